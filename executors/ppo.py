"""The task type `ppo`: proximal policy optimisation with the last TRL that has it, in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from executors.base import bad_input
from executors.data.columns import prompt_rows
from executors.training.rewards import check_reward, check_reward_rows
from executors.training.run import Parts, Rows, Training
from gpuflow.importing import loading
from gpuflow.protocol import Request
from gpuflow.spec.policy_tuning import FIXED

#: Field of the section `generation` -> field of PPOConfig.
_GENERATION: Mapping[str, str] = {"max_new_tokens": "response_length", "temperature": "temperature"}


class PolicyTuning(Training):
    """Trains on prompts: samples an answer to each, scores it, and keeps near the model that it began with.

    TRL's PPO cannot go on from a checkpoint, so none is made: another attempt begins again.
    """

    task_types: ClassVar[tuple[str, ...]] = ("ppo",)
    environment: ClassVar[str] = "ppo"
    bare: ClassVar[str] = "prompt"
    padding_side: ClassVar[Literal["left", "right"]] = "left"
    resumes: ClassVar[bool] = False

    def check(self, request: Request) -> None:
        """Refuse a reward that is unknown, and what TRL's PPO cannot do."""
        check_reward(request)
        if (request.spec.get("data") or {}).get("eval_split"):
            raise bad_input("data.eval_split: TRL's PPO evaluates nothing; leave it out, or use grpo")
        self.extra_arguments(request)

    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with {prompt}."""
        return [{"prompt": row["prompt"]} for row in prompt_rows(rows, data)]

    def check_rows(self, request: Request, rows: Rows) -> None:
        """Refuse a reward function that reads other columns: PPO hands it texts only."""
        check_reward_rows(request, rows)

    def config(self) -> type[Any]:
        """Return PPOConfig. Raises ImportError where TRL is too new, or missing."""
        with loading():
            from trl.experimental.ppo import PPOConfig

        config: type[Any] = PPOConfig
        return config

    def extra_arguments(self, request: Request) -> dict[str, Any]:
        """Return what the section `generation` says in the words of PPOConfig. Raises ExecutorError: BadInput."""
        training: Mapping[str, Any] = request.spec.get("training") or {}
        found: dict[str, Any] = {"save_strategy": "no", "num_sample_generations": 0}
        for name, value in (request.spec.get("generation") or {}).items():
            if name in FIXED and value is not None and value not in FIXED[name]:
                raise bad_input(f"generation.{name} is {value}, which TRL's PPO has no such choice for; leave it out")
            if name in _GENERATION and value is not None:
                field = _GENERATION[name]
                if training.get(field, value) != value:
                    raise bad_input(
                        f"training.{field} is {training[field]}, but the section generation says {value} ({name}); "
                        "keep one of both"
                    )
                found[field] = value
        return found

    def trainer(self, parts: Parts) -> Any:
        """Return TRL's PPOTrainer, with a value model that begins as the model itself."""
        import copy

        with loading():
            import datasets
            from transformers import AutoModelForSequenceClassification
            from trl.experimental.ppo import PPOTrainer

        from executors.modeling.loading import load_model
        from executors.training.scoring import RewardModule, padded_prompts, text_scorer
        from executors.training.shaping import shape_prompts

        arguments, request = parts.arguments, parts.job.request
        rows = shape_prompts(parts.job.train_rows, chat=parts.has_template)
        ranks = int(os.environ.get("WORLD_SIZE") or 1)
        step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks
        if len(rows) < step:
            raise bad_input(
                f"data: a step takes {step} prompts (batch size times gradient_accumulation_steps times processes), "
                f"and there are {len(rows)}; give more, or a smaller batch"
            )
        if arguments.max_steps > 0 and arguments.total_episodes is None:
            arguments.total_episodes = arguments.max_steps * step
        longest = parts.job.training.get("max_prompt_length")
        prompts, width = padded_prompts([row["prompt"] for row in rows], parts.tokenizer, longest=longest)
        options = {**parts.location.options, "dtype": str(parts.model.dtype).removeprefix("torch."), "num_labels": 1}
        value_model = load_model(parts.location, options, AutoModelForSequenceClassification)
        dataset = datasets.Dataset.from_list(prompts)
        return PPOTrainer(
            args=arguments,
            processing_class=parts.tokenizer,
            model=parts.model,
            ref_model=None if parts.peft_config is not None else copy.deepcopy(parts.model),
            reward_model=RewardModule(text_scorer(request, parts.job.emitter), parts.tokenizer, width),
            value_model=value_model,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(1)),
            callbacks=list(parts.callbacks),
            peft_config=parts.peft_config,
        )

    def trained_model(self, trainer: Any) -> Any:
        """Return the policy, without the value model."""
        return trainer.accelerator.unwrap_model(trainer.model).policy
