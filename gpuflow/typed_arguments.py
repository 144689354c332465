"""Arguments of tasks that are pydantic models (`@app.task(pydantic=True)`): checked at submit, and where a call runs.

Celery's own wrapper makes models of them in the worker, once more. Checked before that, a call that cannot be is
refused by name and cause, and never tried again.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from celery.utils.annotations import annotation_issubclass, get_optional_arg
from pydantic import BaseModel, ValidationError

from gpuflow.errors import InvalidTemplate
from gpuflow.spec.report import Mistake

#: So many mistakes of one call are told.
_MOST: Final = 5


class TypedArguments:
    """What the function of one task takes. Built of the options that Celery's `pydantic=True` has."""

    def __init__(self, fun: Callable[..., Any], *, bound: bool, options: Mapping[str, Any]) -> None:
        self._bound = bound
        self._strict = bool(options.get("pydantic_strict"))
        self._context = dict(options.get("pydantic_context") or {})
        self._dump = {"mode": "json", **(options.get("pydantic_dump_kwargs") or {})}
        self._signature = inspect.signature(fun)
        try:
            self._hints = typing.get_type_hints(fun)
        except (NameError, AttributeError, TypeError):  # as Celery does: annotations as they stand, then
            self._hints = {name: one.annotation for name, one in self._signature.parameters.items()}

    def check(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise InvalidTemplate for arguments that the function does not take, with every field that is wrong.

        A model among them has to be what Celery has left as it is: one that JSON would change. What a validator raises
        itself, beside what pydantic makes of it, says nothing: it may need what only a worker has.
        """
        try:
            given = self._signature.bind(*([None] if self._bound else []), *args, **kwargs).arguments
        except TypeError as error:
            raise InvalidTemplate(f"task {task.name}: {error}") from None
        mistakes = []
        for name, value in given.items():
            model = self._model(name, value)
            if model is not None:
                mistakes += self._mistakes(task, name, value, model)
        if mistakes:
            more = f"; and {len(mistakes) - _MOST} more" if len(mistakes) > _MOST else ""
            told = "; ".join(f"argument {one.path}: {one.message}" for one in mistakes[:_MOST])
            raise InvalidTemplate(f"task {task.name}: {told}{more}", mistakes=tuple(mistakes))

    def _model(self, name: str, value: Any) -> type[BaseModel] | None:
        hint = self._hints.get(name)
        if value is not None and (inner := get_optional_arg(hint)) is not None:
            hint = inner
        return hint if annotation_issubclass(hint, BaseModel) else None

    def _mistakes(self, task: Any, name: str, value: Any, model: type[BaseModel]) -> list[Mistake]:
        is_model = isinstance(value, BaseModel) and not hasattr(type(value), "__json__")
        try:
            sent = value.model_dump(**self._dump) if is_model else value
            context = {**self._context, "celery_app": task.app, "celery_task_name": task.name}
            model.model_validate(sent, strict=self._strict, context=context)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            return [Mistake(path=".".join([name, *map(str, one["loc"])]), message=one["msg"]) for one in found]
        except Exception:  # noqa: BLE001  (the worker's to say)
            return []
        if not is_model:
            return []
        cause = f"a {type(value).__name__} is not read again as it is from its JSON; give a {model.__name__} that is"
        return [Mistake(path=name, message=cause)]
