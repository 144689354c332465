"""The task types `sft` and `lora_sft`: supervised fine-tuning with TRL, of all weights or of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from executors.base import Executor, bad_input, write_responses
from executors.checkpoints import Checkpoint, folder_of, to_resume
from executors.data.columns import training_rows
from executors.data.hub import hub_rows
from executors.data.sources import as_rows, eval_entries, read_rows
from executors.data.splits import split
from executors.modeling.libraries import prepare_libraries
from gpuflow.protocol import Emitter, Request, complete_checkpoints

#: Seed of the split and of the training where the task names none; TRL's own default.
DEFAULT_SEED = 42

Rows = list[dict[str, Any]]


class SupervisedTuning(Executor):
    """Trains on the rows of `data`; leaves final_model/ or final_lora/ and the history of the losses."""

    task_types: ClassVar[tuple[str, ...]] = ("sft", "lora_sft")

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Check the data, load the model, evaluate, train, evaluate again, save."""
        training: Mapping[str, Any] = request.spec.get("training") or {}
        train_rows, eval_rows = _read_data(request, training, emitter)
        resumed = to_resume(request.resume_from)
        prepare_libraries()
        emitter.status("loading", "loading the model")
        trainer, progress, location = _trainer(request, training, train_rows, eval_rows, emitter)
        from executors.distributed.preparing import before_training
        from executors.training.checkpoints import saved_on_notice

        with before_training(trainer):
            before = _evaluate(trainer, emitter, "evaluating before the training") if eval_rows else None
        emitter.status("working", f"training on {len(train_rows)} rows")
        with saved_on_notice(trainer, resumed, emitter):
            outcome = _train(trainer, resumed)
            after = _evaluate(trainer, emitter, "evaluating after the training") if eval_rows else None
            result: dict[str, Any] = {
                "steps": trainer.state.global_step,
                "resumed_from_step": resumed.step if resumed else None,
                "train_loss": progress.mean_loss() if resumed else outcome.training_loss,
                "eval_loss_before": before,
                "eval_loss_after": after,
                "model": location.name,
                "metrics": {**outcome.metrics, "train_rows": len(train_rows), "eval_rows": len(eval_rows)},
                "checkpoints": [str(path) for path in complete_checkpoints(folder_of(request))],
            }
            if training.get("save_model", True):
                result |= _save(request, trainer, location.name, emitter)
            write_responses(request, emitter, {**result, "items": [], "history": progress.history})
        return result


def _read_data(request: Request, training: Mapping[str, Any], emitter: Emitter) -> tuple[Rows, Rows]:
    data: Mapping[str, Any] = request.spec.get("data") or {}
    rows = training_rows(read_rows(data, request.cache_dir, emitter, bare="text"), data)
    share = data.get("eval_split") or 0
    if isinstance(share, Mapping):
        return rows, training_rows(as_rows(eval_entries(data), bare="text"), data)
    if isinstance(share, str):
        if data.get("type") != "dataset":
            raise bad_input(
                f"data.eval_split {share!r} names a split, which only hub data sets have; give a share or a file"
            )
        return rows, training_rows(as_rows(hub_rows(data, share), bare="text"), data)
    seed = data.get("seed")
    return split(rows, share, int(training.get("seed", DEFAULT_SEED) if seed is None else seed))


def _trainer(
    request: Request, training: Mapping[str, Any], train_rows: Rows, eval_rows: Rows, emitter: Emitter
) -> tuple[Any, Any, Any]:
    import datasets
    from transformers import PrinterCallback, set_seed
    from trl import SFTTrainer

    from executors.distributed.preparing import shard_where_asked
    from executors.modeling.loading import load_model, load_tokenizer, locate, merged
    from executors.modeling.precision import training_dtype
    from executors.training.arguments import lora_config, saves_by_clock, sft_arguments
    from executors.training.checkpoints import Checkpoints
    from executors.training.progress import Progress
    from executors.training.shaping import shape

    datasets.disable_progress_bars()
    arguments = sft_arguments(training, str(folder_of(request)), has_eval=bool(eval_rows))
    shard_where_asked(arguments)
    set_seed(arguments.seed)
    location, adapters = locate(request, emitter)
    tokenizer = load_tokenizer(location, padding_side="right")
    is_lora = request.task_type == "lora_sft"
    options = {
        "dtype": training_dtype(location, is_lora=is_lora, bf16=bool(arguments.bf16)),
        **(training.get("model_init_kwargs") or {}),
        **((request.spec.get("model") or {}).get("transformers") or {}),
    }
    model = merged(load_model(location, options), adapters)
    chat = bool(tokenizer.chat_template)
    separator = (request.spec.get("data") or {}).get("separator")
    sets = [
        datasets.Dataset.from_list(shape(rows, chat=chat, separator=separator)) if rows else None
        for rows in (train_rows, eval_rows)
    ]
    progress = Progress(emitter)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=sets[0],
        eval_dataset=sets[1],
        processing_class=tokenizer,
        peft_config=lora_config(request.spec.get("lora"), model.config.model_type) if is_lora else None,
        callbacks=[progress, Checkpoints(emitter, arguments, by_clock=saves_by_clock(training))],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, progress, location


def _train(trainer: Any, resumed: Checkpoint | None) -> Any:
    from executors.training.checkpoints import take_no_step

    if resumed is None:
        return trainer.train()
    if resumed.finished:
        take_no_step(trainer)
    return trainer.train(resume_from_checkpoint=str(resumed.path))


def _evaluate(trainer: Any, emitter: Emitter, message: str) -> float:
    emitter.status("working", message)
    return float(trainer.evaluate()["eval_loss"])


def _save(request: Request, trainer: Any, base_name: str, emitter: Emitter) -> dict[str, Any]:
    from executors.distributed.gathering import whole_state
    from executors.training.saving import save_final

    state = whole_state(trainer)
    if not trainer.is_world_process_zero():
        return {}
    name = "final_lora" if request.task_type == "lora_sft" else "final_model"
    emitter.status("cleaning_up", f"saving {name}")
    model = trainer.accelerator.unwrap_model(trainer.model)
    save_final(model, trainer.processing_class, Path(request.output_dir) / name, base_name=base_name, state=state)
    emitter.artifact(name)
    return {name: name}
