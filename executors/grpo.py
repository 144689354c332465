"""The task type `grpo`: group relative policy optimisation with TRL, rewarded by a model or a named function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from executors.base import bad_input
from executors.data.columns import prompt_rows
from executors.training.rewards import check_reward, check_reward_rows, load_reward
from executors.training.run import Parts, Rows, Training
from gpuflow.importing import loading
from gpuflow.protocol import Request

#: Field of the section `generation` -> field of TRL's GRPOConfig.
_GENERATION: Mapping[str, str] = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "num_return_sequences": "num_generations",
}


class GroupTuning(Training):
    """Trains on prompts: samples a group of answers to each, scores them, and learns from the differences."""

    task_types: ClassVar[tuple[str, ...]] = ("grpo",)
    continues_adapters: ClassVar[bool] = True
    measure: ClassVar[str] = "eval_reward"
    bare: ClassVar[str] = "prompt"
    padding_side: ClassVar[Literal["left", "right"]] = "left"

    def check(self, request: Request) -> None:
        """Refuse a reward that is unknown, and answers that would all be equal."""
        check_reward(request)
        generation: Mapping[str, Any] = request.spec.get("generation") or {}
        if generation.get("do_sample") is False or generation.get("temperature") == 0:
            raise bad_input(
                "generation: grpo compares different answers to one prompt; leave do_sample out and set a temperature "
                "above 0"
            )
        self.extra_arguments(request)

    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with {prompt} and the other columns, which reward functions read."""
        return prompt_rows(rows, data)

    def check_rows(self, request: Request, rows: Rows) -> None:
        """Refuse rows without the column that the reward function reads."""
        check_reward_rows(request, rows)

    def config(self) -> type[Any]:
        """Return TRL's GRPOConfig."""
        with loading():
            from trl import GRPOConfig

        return GRPOConfig

    def extra_arguments(self, request: Request) -> dict[str, Any]:
        """Return what the sections `generation` and `reward_model` say in the words of GRPOConfig.

        Raises ExecutorError: BadInput where `training` says something else.
        """
        training: Mapping[str, Any] = request.spec.get("training") or {}
        generation: Mapping[str, Any] = request.spec.get("generation") or {}
        found = {_GENERATION[name]: value for name, value in generation.items() if name in _GENERATION}
        if found.get("top_k") == -1:
            found["top_k"] = 0  # TRL's word for no limit
        for name, value in found.items():
            if training.get(name, value) != value:
                raise bad_input(
                    f"training.{name} is {training[name]}, but the section generation says {value}; keep one of both"
                )
        if generation.get("min_new_tokens") is not None:
            given = training.get("generation_kwargs") or {}
            found["generation_kwargs"] = {**given, "min_new_tokens": generation["min_new_tokens"]}
        weight = (request.spec.get("reward_model") or {}).get("weight")
        return found if weight is None else {**found, "reward_weights": [float(weight)]}

    def trainer(self, parts: Parts) -> Any:
        """Return TRL's GRPOTrainer."""
        with loading():
            from trl import GRPOTrainer

        from executors.training.shaping import shape_prompts

        request, arguments = parts.job.request, parts.arguments
        group = arguments.num_generations_eval or arguments.num_generations
        if parts.job.eval_rows and (arguments.per_device_eval_batch_size * arguments.world_size) % group:
            raise bad_input(
                f"training.per_device_eval_batch_size is {arguments.per_device_eval_batch_size}; for an evaluation it "
                f"must be a multiple of the {group} answers to a prompt (num_generations)"
            )
        if arguments.beta and arguments.fsdp and not parts.job.is_lora:
            raise bad_input("training.beta needs a second model, which training.fsdp does not spread; use section lora")
        reward, reward_tokenizer = load_reward(request, parts.job.emitter)
        shaped = [shape_prompts(rows, chat=parts.has_template) for rows in (parts.job.train_rows, parts.job.eval_rows)]
        needs_reference = bool(parts.arguments.beta) and not parts.job.is_lora
        if needs_reference:  # TRL loads it by the name of the model, with these arguments
            parts.arguments.model_init_kwargs = {**parts.location.options, "dtype": parts.model.dtype}
        trainer = GRPOTrainer(
            **parts.common(*shaped), reward_funcs=[reward], reward_processing_classes=[reward_tokenizer]
        )
        if needs_reference:  # with the adapters that were merged into the model
            trainer.ref_model.load_state_dict(parts.model.state_dict())
        return trainer
