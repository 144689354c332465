"""The course of every training: check, read the data, load the model, evaluate, train, evaluate again, save.

A task type derives from `Training` and adds its own: which rows it takes, TRL's configuration and its trainer.
"""

from __future__ import annotations

import os
import time
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
from executors.training.arguments import allows_non_finite_loss
from executors.training.health import find_warnings
from executors.training.memory import Batch, free_memory, is_out_of_memory, without_room
from executors.training.requirements import check_requirements, quantised
from executors.training.rows import RowCounts, without_empty
from executors.training.tracking import finish_tracking, prepare_tracking
from gpuflow.importing import loading
from gpuflow.protocol import Emitter, Request, complete_checkpoints

if TYPE_CHECKING:
    from executors.modeling.location import Location
    from executors.training.lengths import Fit, Tell

#: Seed of the split and of the training where the task names none; TRL's own default.
DEFAULT_SEED = 42
#: Between two words on how far rows are counted, in seconds.
_TELL_SECONDS = 10.0

Rows = list[dict[str, Any]]


@dataclass(kw_only=True)
class Job:
    """One training: what is asked, the rows, and how far it has come. `batch` is given for a second try."""

    request: Request
    emitter: Emitter
    train_rows: Rows
    eval_rows: Rows
    #: Rows that hold nothing to learn from, and are in neither of both.
    empty_rows: int
    resumed: Checkpoint | None
    #: What the result warns of, beside what the history shows.
    warnings: Sequence[str] = ()
    batch: Batch | None = None
    #: Set once the model is loaded: from then on a smaller batch may help.
    loaded: Batch | None = None
    #: Rows that are longer than the trainer takes, and are trained on in part.
    cut_rows: int = 0

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
    #: Whether `measure` is the loss of predicting the next token, in nats.
    predicts_tokens: ClassVar[bool] = False
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

    def check_tokenizer(self, request: Request, rows: Rows, tokenizer: Any, name: str) -> None:
        """Refuse what the tokenizer of the model `name` cannot do, before the model is loaded. Raises ExecutorError."""

    def fit(self, rows: Rows, tokenizer: Any, arguments: Any, *, separator: str | None, tell: Tell) -> Fit | None:
        """Return how rows with roles fit into the trainer's limit of length; None for a trainer without one.

        `tell` is called with how many rows are done, again and again.
        """
        return None

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
        _, warnings = allows_non_finite_loss(request.spec.get("training") or {})
        train_rows, eval_rows, empty_rows, unused = self._read_data(request, emitter)
        for rows in (train_rows, eval_rows):
            self.check_rows(request, rows)
        if empty_rows:
            emitter.status("loading", f"{empty_rows} rows of the data are empty; they are left out")
        resumed = to_resume(request.resume_from) if self.resumes else None
        prepare_libraries()
        prepare_tracking(request)
        job = Job(
            request=request,
            emitter=emitter,
            train_rows=train_rows,
            eval_rows=eval_rows,
            empty_rows=empty_rows,
            resumed=resumed,
            warnings=[*warnings, *unused],
        )
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

    def named_columns(self, request: Request, rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], list[str]]:
        """Return the section `data` with what other sections say of the columns of these rows, and warnings."""
        return request.spec.get("data") or {}, []

    def _read_data(self, request: Request, emitter: Emitter) -> tuple[Rows, Rows, int, list[str]]:
        """Return the rows to train on and to evaluate on, how many empty ones are left out of both, and warnings."""
        read = read_rows(request.spec.get("data") or {}, request.cache_dir, emitter, bare=self.bare)
        data, warnings = self.named_columns(request, read)
        given = self.roles(read, data)
        rows = without_empty(given)
        empty = len(given) - len(rows)
        share = data.get("eval_split") or 0
        if isinstance(share, Mapping | str):
            given = self.roles(self._eval_rows(data, share), data)
            eval_rows = without_empty(given)
            return rows, eval_rows, empty + len(given) - len(eval_rows), warnings
        return *split(rows, share, split_seed(request)), empty, warnings

    def _eval_rows(self, data: Mapping[str, Any], named: Mapping[str, Any] | str) -> Sequence[Mapping[str, Any]]:
        if isinstance(named, Mapping):
            return as_rows(eval_entries(data), bare=self.bare)
        if data.get("type") != "dataset":
            raise bad_input(
                f"data.eval_split {named!r} names a split, which only hub data sets have; give a share or a file"
            )
        return as_rows(hub_rows(data, named), bare=self.bare)

    def _complete(self, job: Job) -> dict[str, Any]:
        emitter, eval_rows = job.emitter, job.eval_rows
        emitter.status("loading", "loading the model")
        trainer, progress, parts = self._trainer(job)
        from executors.distributed.preparing import before_training
        from executors.training.checkpoints import saved_on_notice

        rows = _counted(job, trainer)
        with before_training(trainer):
            before = self._evaluate(trainer, emitter, "evaluating before the training") if eval_rows else None
        emitter.status("working", f"training on {rows.trained} rows")
        with saved_on_notice(trainer, job.resumed, emitter) if self.resumes else nullcontext():
            outcome = _train(trainer, job.resumed)
            after = self._evaluate(trainer, emitter, "evaluating after the training") if eval_rows else None
            train_loss = progress.mean_loss() if job.resumed or outcome is None else outcome.training_loss
            counts = {"train_loss": train_loss, "train_rows": rows.trained, "eval_rows": rows.evaluated}
            result: dict[str, Any] = {
                "steps": trainer.state.global_step,
                "resumed_from_step": job.resumed.step if job.resumed else None,
                "train_loss": train_loss,
                f"{self.measure}_before": before,
                f"{self.measure}_after": after,
                "model": parts.location.name,
                "dtype": str(parts.model.dtype).removeprefix("torch."),
                **settings(job.request, parts.arguments),
                **rows.record(),
                "warnings": [*job.warnings, *self._warnings(progress.history, after, trainer)],
                "metrics": {**(outcome.metrics if outcome else {}), **counts},
                "checkpoints": [str(path) for path in complete_checkpoints(folder_of(job.request))],
            }
            if job.batch is not None:
                result["out_of_memory_retry"] = job.batch.record()
            if job.training.get("save_model", True):
                result |= self._save(job, trainer, parts)
            if trainer.is_world_process_zero():
                _plot(job.request, progress.history, emitter)
                finish_tracking(job.request, emitter)
            write_responses(job.request, emitter, {**result, "items": [], "history": progress.history})
        return result

    def _warnings(self, history: Sequence[Mapping[str, Any]], after: float | None, trainer: Any) -> list[str]:
        vocabulary = getattr(trainer.model.config, "vocab_size", None) if self.predicts_tokens else None
        return find_warnings(history, eval_loss=after, vocabulary=vocabulary)

    def _check_lengths(self, job: Job, tokenizer: Any, arguments: Any) -> None:
        """Count the rows that are too long. Raises ExecutorError: BadInput where none is left."""
        from executors.training.lengths import check_fit

        separator = (job.request.spec.get("data") or {}).get("separator")
        for side, rows in (("evaluation", job.eval_rows), ("training", job.train_rows)):
            tell = _counting(job.emitter, len(rows))
            fit = self.fit(rows, tokenizer, arguments, separator=separator, tell=tell) if rows else None
            if fit is None:
                continue
            lost = check_fit(fit, arguments.max_length, side)
            if lost:
                job.emitter.status("loading", f"{lost}; they are left out")
            job.cut_rows = fit.cut

    def _trainer(self, job: Job) -> tuple[Any, Any, Parts]:
        with loading():
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
            self.check_tokenizer(request, rows, tokenizer, location.name)
        self._check_lengths(job, tokenizer, arguments)
        options = {
            "dtype": training_dtype(location, is_lora=job.is_lora, bf16=bool(arguments.bf16)),
            **(training.get("model_init_kwargs") or {}),
            **((request.spec.get("model") or {}).get("transformers") or {}),
        }
        if quantised(request):
            options.setdefault("device_map", {"": int(os.environ.get("LOCAL_RANK") or 0)})
        model = begin(self.load_model(location, options), start)
        job.loaded = job.batch or Batch.of(arguments)
        progress = Progress(emitter, fails_on_nan=not allows_non_finite_loss(training)[0])
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
        save_final(model, trainer.processing_class, target, base=parts.location, state=state)
        job.emitter.artifact(name)
        return {name: name}


def _dataset(rows: Rows) -> Any:
    """Return rows as a data set; what differs from row to row (the arguments of tool calls) stays as it is, as JSON."""
    import datasets

    return datasets.Dataset.from_list(rows, on_mixed_types="use_json")


def split_seed(request: Request) -> int:
    """Return the seed by which rows are put aside for the evaluation."""
    seed = (request.spec.get("data") or {}).get("seed")
    return int((request.spec.get("training") or {}).get("seed", DEFAULT_SEED) if seed is None else seed)


def settings(request: Request, arguments: Any) -> dict[str, Any]:
    """Return what was chosen for a training and changes its numbers: for the result."""
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    size, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    compute = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else None
    return {
        "learning_rate": arguments.learning_rate,
        "num_train_epochs": arguments.num_train_epochs,
        "max_length": getattr(arguments, "max_length", None),
        "compute_dtype": compute,
        "batch": {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
            "ranks": ranks,
            "effective": size * accumulation * ranks,
        },
        "seeds": {"training": arguments.seed, "data": arguments.data_seed, "split": split_seed(request)},
    }


def _counted(job: Job, trainer: Any) -> RowCounts:
    """Return the rows that are used: the trainer's own count, where it has dropped some by its limit of length."""
    given, evaluated = len(job.train_rows), len(job.eval_rows)
    read = given + evaluated + job.empty_rows
    counts = RowCounts(read=read, trained=given, evaluated=evaluated, empty=job.empty_rows, truncated=job.cut_rows)
    if getattr(trainer.args, "packing", False):
        return counts
    is_packed = getattr(trainer.args, "eval_packing", False)
    kept = len(trainer.train_dataset)
    kept_for_eval = len(trainer.eval_dataset) if evaluated and not is_packed else evaluated
    if not kept:
        limit = f"training.max_length {getattr(trainer.args, 'max_length', None)}"
        raise bad_input(f"data: none of {given} rows is left within {limit}; raise it, or give shorter rows")
    lost = given - kept + evaluated - kept_for_eval
    return replace(counts, trained=kept, evaluated=kept_for_eval, too_long=lost)


def _counting(emitter: Emitter, rows: int) -> Tell:
    """Return what tells how many of the rows are counted, every few seconds."""
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            emitter.status("loading", f"counting the tokens of the rows: {done} of {rows}")

    return tell


def _train(trainer: Any, resumed: Checkpoint | None) -> Any:
    from executors.training.checkpoints import take_no_step

    if resumed is None:
        return trainer.train()
    if resumed.finished:
        take_no_step(trainer)
    return trainer.train(resume_from_checkpoint=str(resumed.path))


def _plot(request: Request, history: Sequence[Mapping[str, float | None]], emitter: Emitter) -> None:
    from executors.training.plots import FILE, plot_history

    if plot_history(history, Path(request.output_dir) / FILE):
        emitter.artifact(FILE)
