"""What a worker would do with a task now is what `explain` says of it, by all that the worker reports of itself.

Both sides are the real ones: the admission of the worker before a pop, with lock files, and the verdict that is made of
its registry entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from gpuflow.broker.gate import ANY_TIME
from gpuflow.broker.keys import Keys
from gpuflow.fleet.gpu_reservation import boot_seconds
from gpuflow.fleet.hardware_nvml import GpuUse, Uses
from gpuflow.fleet.registry import WorkerEntry
from gpuflow.fleet.worker_views import view_of
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.situation import Situation, judge
from gpuflow.routing.views import TaskView
from gpuflow.settings import Settings
from gpuflow.worker.presence import PresenceThread
from gpuflow.worker.sessions.entry import SessionEntry
from gpuflow.worker.task_limits import TaskLimits
from tests.support.admission import TOTAL_MIB, Client, worker

KINDS = (("a100",), ("h100",))
ASKS = (
    Requirement(gpu_count=1),
    Requirement(gpu_count=1, gpu_names=("h100",)),
    Requirement(gpu_count=2),
    Requirement(gpu_count=1, vram_gb_min=40.0),
    Requirement(gpu_count=1, gpu_share=0.5),
    Requirement(gpu_count=1, cpu=6.0),
    Requirement(cpu=1.0),
    Requirement(cpu=5.0),
    Requirement(memory_mib=6_000),
    Requirement(memory_mib=12_000, cpu=1.0),
    Requirement(gpu_count=1, memory_mib=9_000),
    Requirement(),
)
BIG = Requirement(gpu_count=2, cpu=4.0)
#: What idles is evicted for no task that may use what is reserved only for a while.
EVICTED_FOR_A_WHILE = {
    "kinds": [("a100",)],
    "foreign_mib": [0],
    "limits": {"max_jobs": None, "cpu_jobs": 1, "threads": 64},
    "held": [],
    "loaded": [(ASKS[0], True)],
    "plain": 0,
    "reserved": (1, 30.0),
    "behind": True,
    "limit": 10.0,
    "asked": ASKS[0],
}
#: The same of the memory of the host.
MEMORY_FOR_A_WHILE = {**EVICTED_FOR_A_WHILE, "loaded": [(ASKS[9], True)], "asked": ASKS[10]}


class SessionOfTests:
    """As much of a loaded model as the pool looks at."""

    of_function = False

    def __init__(self) -> None:
        self.state, self.running, self.used_at, self.ready_at = "ready", 0, 0.0, 0.0
        self.told = SimpleNamespace(
            model="m", engine="e", memory_bytes=0, max_requests=4, load_seconds=1.0, lifetime_seconds=None
        )

    def is_suspect(self, now: float) -> bool:
        return False

    def close(self) -> None:
        self.state = "closing"


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    gpus = draw(st.integers(0, 3))
    return {
        "kinds": draw(st.lists(st.sampled_from(KINDS), min_size=gpus, max_size=gpus)),
        "foreign_mib": draw(st.lists(st.sampled_from([0, 0, 0, 30_000]), min_size=gpus, max_size=gpus)),
        "limits": {
            "max_jobs": draw(st.sampled_from([None, None, 1, 2])),
            "cpu_jobs": draw(st.integers(1, 2)),
            "threads": draw(st.sampled_from([64, 64, 2])),
        },
        "held": draw(st.lists(st.sampled_from(ASKS), max_size=4)),
        "loaded": draw(st.lists(st.tuples(st.sampled_from(ASKS), st.booleans()), max_size=2)),
        "plain": draw(st.sampled_from([0, 0, 0, 1, 2])),
        "reserved": draw(st.none() | st.tuples(st.integers(1, 3), st.none() | st.sampled_from([30.0, 600.0]))),
        "behind": draw(st.booleans()),
        "limit": draw(st.none() | st.sampled_from([10.0, 3600.0])),
        "asked": draw(st.sampled_from(ASKS)),
    }


@settings(max_examples=1000, deadline=None)
@given(situations())
@example(EVICTED_FOR_A_WHILE)
@example(MEMORY_FOR_A_WHILE)
def test_explain_says_what_the_worker_would_do(found: Mapping[str, Any]) -> None:
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        box = Box(Path(folder), found)
        told, starts = box.told(), box.starts()
        event(told.kind)
        assert starts == (told.kind == "free"), f"{told.kind}: {told.text}; {found}"


class Box:
    """One worker in a situation."""

    def __init__(self, folder: Path, found: Mapping[str, Any]) -> None:
        self.found = found
        self.asked: Requirement = found["asked"]
        self.client = Client()
        (self.queue, self.big) = self.client.register(self.asked, BIG)
        self.client.register(*ASKS)
        gpus = tuple(
            GpuCapability(uuid=f"GPU-{n}", index=n, names=names, vram_gb=80.0, total_mib=TOTAL_MIB)
            for n, names in enumerate(found["kinds"])
        )
        self.capability = Capability(gpus=gpus, cpu_count=8, memory_mib=16_000)
        self.admission = worker(
            self.client, folder / "locks", self.capability, warm=True, query=self._uses, **found["limits"]
        )
        self.ready = [self.big, self.queue] if found["behind"] else [self.queue, self.big]
        self.admission.matcher.served(self.ready)  # what their tasks ask for is known to a worker that has seen them
        self._fill()

    def _uses(self, uuids: Sequence[str]) -> Uses:
        used = dict(zip((gpu.uuid for gpu in self.capability.gpus), self.found["foreign_mib"], strict=True))
        uses = {
            uuid: GpuUse(uuid=uuid, total_mib=TOTAL_MIB, used_mib=used.get(uuid, 0), processes=()) for uuid in uuids
        }
        return Uses(uses=uses, failed={})

    def _fill(self) -> None:
        tags = (f"tag-{number}" for number in itertools.count())
        for asked in self.found["held"]:
            self._take(asked, next(tags))
        for asked, idles in self.found["loaded"]:
            if asked.gpu_count and any(self.found["foreign_mib"]):
                continue  # what is foreign on a GPU that is held whole is not known to anybody
            self._load(asked, next(tags), idles=idles)
        for _ in range(self.found["plain"]):
            if self.admission.open_queues(["mine"]):
                self.admission.on_leased("mine", next(tags))
        if self.found["reserved"] is not None and self.capability.gpus:
            count, seconds = self.found["reserved"]
            self.admission._gpus.reserve(
                task="big",
                queue=self.big,
                gpus=[gpu.uuid for gpu in self.capability.gpus[:count]],
                worker="another",
                term_seconds=60,
                deadline=None if seconds is None else boot_seconds() + seconds,
            )

    def _take(self, asked: Requirement, tag: str, session: str = "") -> bool:
        queue = asked.queue_name()
        if queue not in [choice.queue for choice in self.admission.choose([queue]) if not choice.warm_only]:
            self.admission.chosen_none()
            return False
        return self.admission.on_leased(queue, tag, session, "inference" if session else "echo")

    def _load(self, asked: Requirement, tag: str, *, idles: bool) -> None:
        if not self._take(asked, tag, f"model-{tag}"):
            return
        (entry,) = [one for one in self._pool()._look() if tag in one.places]
        cast("SessionEntry", entry).session = cast("Any", SessionOfTests())
        if idles:
            self.admission.on_lease_ended(tag)

    def _pool(self) -> Any:
        assert self.admission.sessions is not None
        return self.admission.sessions

    def starts(self) -> bool:
        """Whether the next message of the queue would be taken now, or once sessions that idle have gone."""
        limit = self.found["limit"]

        def taken() -> bool:
            choices = [one for one in self.admission.choose(self.ready, barren=[self.big]) if one.queue == self.queue]
            self.admission.chosen_none()
            return any(
                one.most_seconds == ANY_TIME or (limit is not None and limit <= one.most_seconds)
                for one in choices
                if not one.warm_only
            )

        if taken():
            return True
        self.admission.on_blocked_by_sessions(self.queue)
        for entry in self._pool().going():
            self._pool()._ended(entry.session)
        return taken()

    def told(self) -> Situation:
        """What `explain` says of the worker, by its entry as another process reads it."""
        runtime = SimpleNamespace(
            app=SimpleNamespace(redis=None, keys=Keys(), settings=Settings(), signer=None),
            admission=self.admission,
            machine_gpus=self.admission._gpus,
            hardware=SimpleNamespace(hostname="box", gpus=self.capability.gpus, driver_problem="", problems=()),
            supported_runtimes=SimpleNamespace(to_dict=dict, secrets=()),
            worker_id="w1",
            ephemeral=False,
            asked_queues=None,
            executors=None,
            user_types=(),
            running={},
            connected=True,
            limits=TaskLimits(),
        )
        entry = PresenceThread(cast("Any", runtime), "w1@box")._entry({})
        seen = WorkerEntry.from_hash(entry.to_hash(), left_ms=120_000)
        big = TaskRecord(id="big", state=TaskState.QUEUED, queue=self.big, requirement=BIG.to_dict())
        view = view_of(seen, {"big": big}, now=0.0)
        return judge(self.asked, self.queue, self._task(), view)

    def _task(self) -> TaskView:
        waiting = {self.big} if self.found["behind"] else set()  # no other queue has messages
        ahead_of = frozenset({self.big, *(ask.queue_name() for ask in ASKS)} - waiting)
        return TaskView(id="asked", name="asked", limit_seconds=self.found["limit"], ahead_of=ahead_of)
