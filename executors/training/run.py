"""The course of every training: check, read the data, load the model, evaluate, train, evaluate again, save.

A task type derives from `Training` and adds its own: which rows it takes, TRL's configuration and its trainer.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from executors.base import Executor, bad_input, write_responses
from executors.checkpoints import Checkpoint, folder_of, to_resume
from executors.data.hub import hub_rows
from executors.data.sources import as_rows, eval_entries, read_rows
from executors.data.splits import split
from executors.modeling.libraries import prepare_libraries
from executors.training.memory import Batch, free_memory, is_out_of_memory, without_room
from executors.training.requirements import check_requirements, quantised
from executors.training.tracking import declare_tracking, prepare_tracking
from gpuflow.protocol import Emitter, Request, complete_checkpoints

if TYPE_CHECKING:
    from executors.modeling.location import Location

#: Seed of the split and of the training where the task names none; TRL's own default.
DEFAULT_SEED = 42

Rows = list[dict[str, Any]]


@dataclass(kw_only=True)
class Job:
    """One training: what is asked, the rows, and how far it has come. `batch` is given for a second try."""

    request: Request
    emitter: Emitter
    train_rows: Rows
    eval_rows: Rows
    resumed: Checkpoint | None
    batch: Batch | None = None
    #: Set once the model is loaded: from then on a smaller batch may help.
    loaded: Batch | None = None

    @property
    def training(self) -> Mapping[str, Any]:
        """The section `training`."""
        return self.request.spec.get("training") or {}

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is trained, not the weights of the model."""
        return self.request.task_type == "lora_sft" or self.request.spec.get("lora") is not None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a trainer is made of."""

    job: Job
    arguments: Any
    location: Location
    model: Any
    tokenizer: Any
    peft_config: Any
    callbacks: Sequence[Any] = field(default_factory=tuple)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer makes text of chats."""
        return bool(self.tokenizer.chat_template)

    @property
    def separator(self) -> str | None:
        """`data.separator` of the task."""
        separator: str | None = (self.job.request.spec.get("data") or {}).get("separator")
        return separator

    def common(self, train_rows: Rows, eval_rows: Rows) -> dict[str, Any]:
        """Return the arguments that all trainers of TRL have, with rows in the trainer's shape."""
        return {
            "model": self.model,
            "args": self.arguments,
            "train_dataset": _dataset(train_rows),
            "eval_dataset": _dataset(eval_rows) if eval_rows else None,
            "processing_class": self.tokenizer,
            "peft_config": self.peft_config,
            "callbacks": list(self.callbacks),
        }


class Training(Executor):
    """Trains on the rows of `data`; leaves final_model/ or final_lora/ and the history of the losses."""

    #: The measure of an evaluation that the result has, before and after the training.
    measure: ClassVar[str] = "eval_loss"
    #: Role of a row that is a bare text.
    bare: ClassVar[str] = "text"
    #: Side on which batches are filled up; those who generate fill up on the left.
    padding_side: ClassVar[Literal["left", "right"]] = "right"
    #: Arguments of the trainer where an adapter is trained and the task does not say.
    lora_defaults: ClassVar[Mapping[str, Any]] = {}
    lora_kind: ClassVar[Literal["CAUSAL_LM", "SEQ_CLS"]] = "CAUSAL_LM"
    #: Whether the trainer can go on from a checkpoint.
    resumes: ClassVar[bool] = True
    #: Whether it can train an adapter on that an earlier training has left.
    continues_adapters: ClassVar[bool] = False

    @abstractmethod
    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with the roles that the trainer takes. Raises ExecutorError: BadInput naming the row."""

    @abstractmethod
    def config(self) -> type[Any]:
        """Return TRL's class for the arguments of the trainer."""

    @abstractmethod
    def trainer(self, parts: Parts) -> Any:
        """Return the trainer."""

    def check(self, request: Request) -> None:
        """Refuse what is wrong in the request, before its data is read. Raises ExecutorError."""

    def check_rows(self, request: Request, rows: Rows) -> None:
        """Refuse rows that the trainer cannot use, before the model is loaded. Raises ExecutorError."""

    def extra_arguments(self, request: Request) -> dict[str, Any]:
        """Return arguments of the trainer that come from other sections than `training`."""
        return {}

    def load_model(self, location: Location, options: Mapping[str, Any]) -> Any:
        """Load the model that is trained."""
        from executors.modeling.loading import load_model

        return load_model(location, options)

    def trained_model(self, trainer: Any) -> Any:
        """Return the model that was trained, to be saved."""
        return trainer.accelerator.unwrap_model(trainer.model)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Do the training; once more with half the batch, where memory does not suffice."""
        self.check(request)
        check_requirements(request)
        train_rows, eval_rows = self._read_data(request, emitter)
        for rows in (train_rows, eval_rows):
            self.check_rows(request, rows)
        resumed = to_resume(request.resume_from) if self.resumes else None
        prepare_libraries()
        prepare_tracking(request)
        job = Job(request=request, emitter=emitter, train_rows=train_rows, eval_rows=eval_rows, resumed=resumed)
        try:
            return self._complete(job)
        except Exception as error:
            if job.loaded is None or not is_out_of_memory(error):
                raise
            batch = job.loaded.halved()
            if batch is None:
                raise without_room(error, job.loaded) from error
            emitter.status("retrying", f"{batch.reason()}: {str(error)[:300]}")
        free_memory()
        is_begun = self.resumes and complete_checkpoints(folder_of(request))
        newest = to_resume(str(folder_of(request))) if is_begun else resumed
        again = replace(job, batch=batch, loaded=None, resumed=newest)
        try:
            return self._complete(again)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise without_room(error, batch) from error

    def _read_data(self, request: Request, emitter: Emitter) -> tuple[Rows, Rows]:
        data: Mapping[str, Any] = request.spec.get("data") or {}
        training: Mapping[str, Any] = request.spec.get("training") or {}
        rows = self.roles(read_rows(data, request.cache_dir, emitter, bare=self.bare), data)
        share = data.get("eval_split") or 0
        if isinstance(share, Mapping):
            return rows, self.roles(as_rows(eval_entries(data), bare=self.bare), data)
        if isinstance(share, str):
            if data.get("type") != "dataset":
                raise bad_input(
                    f"data.eval_split {share!r} names a split, which only hub data sets have; give a share or a file"
                )
            return rows, self.roles(as_rows(hub_rows(data, share), bare=self.bare), data)
        seed = data.get("seed")
        return split(rows, share, int(training.get("seed", DEFAULT_SEED) if seed is None else seed))

    def _complete(self, job: Job) -> dict[str, Any]:
        emitter, eval_rows = job.emitter, job.eval_rows
        emitter.status("loading", "loading the model")
        trainer, progress, parts = self._trainer(job)
        from executors.distributed.preparing import before_training
        from executors.training.checkpoints import saved_on_notice

        trained_rows = _trained_rows(job, trainer)
        with before_training(trainer):
            before = self._evaluate(trainer, emitter, "evaluating before the training") if eval_rows else None
        emitter.status("working", f"training on {trained_rows} rows")
        with saved_on_notice(trainer, job.resumed, emitter) if self.resumes else nullcontext():
            outcome = _train(trainer, job.resumed)
            after = self._evaluate(trainer, emitter, "evaluating after the training") if eval_rows else None
            train_loss = progress.mean_loss() if job.resumed or outcome is None else outcome.training_loss
            counts = {"train_loss": train_loss, "train_rows": trained_rows, "eval_rows": len(eval_rows)}
            result: dict[str, Any] = {
                "steps": trainer.state.global_step,
                "resumed_from_step": job.resumed.step if job.resumed else None,
                "train_loss": train_loss,
                f"{self.measure}_before": before,
                f"{self.measure}_after": after,
                "model": parts.location.name,
                "dtype": str(parts.model.dtype).removeprefix("torch."),
                "metrics": {**(outcome.metrics if outcome else {}), **counts},
                "checkpoints": [str(path) for path in complete_checkpoints(folder_of(job.request))],
            }
            if job.batch is not None:
                result["out_of_memory_retry"] = job.batch.record()
            if job.training.get("save_model", True):
                result |= self._save(job, trainer, parts)
            if trainer.is_world_process_zero():
                _plot(job.request, progress.history, emitter)
                declare_tracking(job.request, emitter)
            write_responses(job.request, emitter, {**result, "items": [], "history": progress.history})
        return result

    def _trainer(self, job: Job) -> tuple[Any, Any, Parts]:
        import datasets
        from transformers import PrinterCallback, set_seed

        from executors.distributed.preparing import shard_where_asked
        from executors.modeling.loading import load_tokenizer, locate
        from executors.modeling.precision import training_dtype
        from executors.training.arguments import lora_config, trainer_arguments
        from executors.training.beginning import begin, beginning
        from executors.training.progress import Progress
        from executors.training.shaping import check_tools

        request, training, emitter = job.request, job.training, job.emitter
        datasets.disable_progress_bars()
        arguments = trainer_arguments(
            self.config(),
            job.batch.applied_to(training) if job.batch else training,
            str(folder_of(request)),
            has_eval=bool(job.eval_rows),
            defaults=self.lora_defaults if job.is_lora else None,
            extra=self.extra_arguments(request),
        )
        if arguments.fsdp and job.training.get("merge_adapter"):
            raise bad_input("training.merge_adapter cannot merge what training.fsdp spreads over processes; keep one")
        shard_where_asked(arguments)
        set_seed(arguments.seed)
        location, adapters = locate(request, emitter)
        start = beginning(request.spec, adapters, is_lora=job.is_lora, may_continue=self.continues_adapters)
        tokenizer = load_tokenizer(location, padding_side=self.padding_side)
        for rows in (job.train_rows, job.eval_rows):
            check_tools(rows, tokenizer, location.name)
        options = {
            "dtype": training_dtype(location, is_lora=job.is_lora, bf16=bool(arguments.bf16)),
            **(training.get("model_init_kwargs") or {}),
            **((request.spec.get("model") or {}).get("transformers") or {}),
        }
        if quantised(request):
            options.setdefault("device_map", {"": int(os.environ.get("LOCAL_RANK") or 0)})
        model = begin(self.load_model(location, options), start)
        job.loaded = job.batch or Batch.of(arguments)
        progress = Progress(emitter, fails_on_nan=not arguments.logging_nan_inf_filter)
        makes_adapter = job.is_lora and start.continued is None
        lora = request.spec.get("lora")
        parts = Parts(
            job=job,
            arguments=arguments,
            location=location,
            model=model,
            tokenizer=tokenizer,
            peft_config=lora_config(lora, kind=self.lora_kind) if makes_adapter else None,
            callbacks=[progress, *self._checkpoints(job, arguments)],
        )
        trainer = self.trainer(parts)
        trainer.remove_callback(PrinterCallback)
        return trainer, progress, parts

    def _checkpoints(self, job: Job, arguments: Any) -> list[Any]:
        from executors.training.arguments import saves_by_clock
        from executors.training.checkpoints import Checkpoints

        if not self.resumes:
            return []
        return [Checkpoints(job.emitter, arguments, by_clock=saves_by_clock(job.training))]

    def _evaluate(self, trainer: Any, emitter: Emitter, message: str) -> float:
        emitter.status("working", message)
        return float(trainer.evaluate()[self.measure])

    def _save(self, job: Job, trainer: Any, parts: Parts) -> dict[str, Any]:
        from executors.distributed.gathering import whole_state
        from executors.training.saving import save_final

        state = whole_state(trainer)
        if not trainer.is_world_process_zero():
            return {}
        merges = job.is_lora and job.training.get("merge_adapter", False)
        name = "final_lora" if job.is_lora and not merges else "final_model"
        job.emitter.status("cleaning_up", f"saving {name}")
        model = self.trained_model(trainer)
        if merges:
            model = model.merge_and_unload()
        target = Path(job.request.output_dir) / name
        save_final(model, trainer.processing_class, target, base_name=parts.location.name, state=state)
        job.emitter.artifact(name)
        return {name: name}


def _dataset(rows: Rows) -> Any:
    """Return rows as a data set; what differs from row to row (the arguments of tool calls) stays as it is, as JSON."""
    import datasets

    return datasets.Dataset.from_list(rows, on_mixed_types="use_json")


def _trained_rows(job: Job, trainer: Any) -> int:
    """Return how many rows are trained on: a trainer drops those of which its limit of length leaves nothing."""
    given = len(job.train_rows)
    if getattr(trainer.args, "packing", False):
        return given
    kept = len(trainer.train_dataset)
    if kept < given:
        limit = f"training.max_length {getattr(trainer.args, 'max_length', None)}"
        said = f"{given - kept} of {given} rows have nothing left to train on within {limit}"
        if not kept:
            raise bad_input(f"data: {said}; raise it, or give shorter rows")
        job.emitter.status("working", f"{said}; they are left out")
    return kept


def _train(trainer: Any, resumed: Checkpoint | None) -> Any:
    from executors.training.checkpoints import take_no_step

    if resumed is None:
        return trainer.train()
    if resumed.finished:
        take_no_step(trainer)
    return trainer.train(resume_from_checkpoint=str(resumed.path))


def _plot(request: Request, history: Sequence[Mapping[str, float]], emitter: Emitter) -> None:
    from executors.training.plots import FILE, plot_history

    if plot_history(history, Path(request.output_dir) / FILE):
        emitter.artifact(FILE)
