"""The served models of a fleet, as they are kept in Redis: what is to be. `gpuflow.serving.replicas` makes it so."""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import replace
from typing import Any, Final

from gpuflow.audit.actors import actor_here
from gpuflow.audit.entries import audit_preamble
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script
from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.serving.models import ServedModel, check
from gpuflow.signatures import SignatureRefused, Signer

log = get_logger("gpuflow.serving")

MOST_MODELS: Final = 200


class ServedModels:
    """The served models of one fleet; `client` must decode responses. Every call raises redis errors."""

    def __init__(self, client: Any, keys: Keys, signer: Signer | None = None) -> None:
        self._client = client
        self._signer = signer
        self._keys = keys

    def serve(self, model: ServedModel) -> str:
        """Have a model served, with an entry in the audit log, in one step.

        Returns `served`, `scaled` (it was served with another number of replicas) or `same`. Raises InvalidTemplate,
        and GPUFlowError where its name is that of another model, or there are too many.
        """
        check(model)
        seconds, micros = self._client.time()
        made = replace(
            model, uid=uuid.uuid4().hex, created_by=actor_here(), created_at=float(seconds) + float(micros) / 1e6
        )
        signature = "" if self._signer is None else self._signer.sign("served", made.signed_part())
        answer: str = load_script("gpuflow.serving", "serve", audit_preamble())(
            self._client,
            self._keys_of_steps(),
            [made.name, made.to_json(signature), made.digest(), made.replicas, MOST_MODELS, made.created_by],
        )
        if answer == "taken":
            raise GPUFlowError(
                f"model {model.name!r} is served already with other options; stop it first with "
                f"`gpuflow serve {model.name} --stop`, or give another --name"
            )
        if answer == "full":
            raise GPUFlowError(f"{MOST_MODELS} models are served; stop one: gpuflow serve NAME --stop")
        return answer

    def stop(self, name: str) -> bool:
        """Have a model served no more; say whether it was."""
        step = load_script("gpuflow.serving", "stop", audit_preamble())
        return bool(step(self._client, self._keys_of_steps(), [name, actor_here()]))

    def find(self, name: str) -> ServedModel | None:
        """Return a served model; None where there is none of this name that can be read, and is signed."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hget(self._keys.served, name)
            pipe.hget(self._keys.served_counts, name)
            text, replicas = pipe.execute()
        return self._read(name, text, replicas) if text else None

    def all(self) -> dict[str, ServedModel]:
        """Return the served models by name; what cannot be read, or is not signed and has to be, is left out."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.served)
            pipe.hgetall(self._keys.served_counts)
            texts, counts = pipe.execute()
        found = {name: self._read(name, text, counts.get(name)) for name, text in sorted(texts.items())}
        return {name: model for name, model in found.items() if model is not None}

    def _read(self, name: str, text: str, replicas: str | None) -> ServedModel | None:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            found = ServedModel.from_json(name, text, replicas)
            if self._signer is not None and self._signer.requires:
                self._check(found, json.loads(text))
            return found
        return None

    def _check(self, model: ServedModel, record: dict[str, Any]) -> None:
        """Raise ValueError for a model that no holder of the key has had served."""
        if self._signer is None:
            return
        given = {name: value for name, value in record.items() if name != "signature"}
        try:
            part = {"name": model.name, "record": given}
            self._signer.check("served", part, record.get("signature"), is_timed=False)
        except SignatureRefused as error:
            log.warning("served_model_refused", model=model.name, reason=error.reason, cause=str(error))
            raise ValueError(str(error)) from None

    def _keys_of_steps(self) -> list[str]:
        keys = self._keys
        return [keys.served, keys.served_counts, keys.served_failures, keys.audit]
