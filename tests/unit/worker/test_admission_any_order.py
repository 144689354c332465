"""No order of what may happen to messages leaks a hold, or gives a GPU to two: two workers of one machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.routing.requirement import Requirement
from gpuflow.worker.admission import Admission
from tests.support.admission import Client, locks_open, machine, worker

ONE = Requirement(gpu_count=1)
A100 = Requirement(gpu_count=1, gpu_names=("a100",))
TWO = Requirement(gpu_count=2)
HALF = Requirement(gpu_count=1, gpu_share=0.5)
CPU = Requirement(cpu=1)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["choose", "taken", "none", "keep", "settled", "gone", "release"]),
        st.integers(0, 1),
        st.integers(0, 4),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_no_order_of_events_leaks_a_hold_or_gives_a_gpu_to_two(steps: list[tuple[str, int, int]]) -> None:
    with TemporaryDirectory() as folder:
        locks, client = Path(folder) / "locks", Client()
        names = client.register(ONE, TWO, HALF, CPU, A100)
        workers = [worker(client, locks, machine(2), name) for name in ("w1", "w2")]
        chosen: list[list[str]] = [[], []]
        tags: list[tuple[Admission, str]] = []
        over: set[str] = set()
        for step, who, what in steps:
            admission = workers[who]
            if step == "choose":
                order = names[what:] + names[:what]
                chosen[who] = [choice.queue for choice in admission.choose(order)]
            elif step == "taken":
                if not chosen[who]:
                    continue
                tags.append((admission, f"tag-{len(tags)}"))
                admission.on_leased(chosen[who][what % len(chosen[who])], tags[-1][1])
                chosen[who] = []
            elif step == "none":
                admission.chosen_none()
                chosen[who] = []
            elif tags:
                owner, tag = tags[what % len(tags)]
                call = {"keep": owner.keep, "settled": owner.on_lease_ended, "gone": owner.child_gone}
                call.get(step, owner.release)(tag)
                over.update([tag] if step == "release" else [])
            used = [
                (uuid, held.hold.share_mib if held.hold else None)
                for admission in workers
                for held in admission._held.values()
                for uuid in held.gpus
            ]
            for uuid in {uuid for uuid, _ in used}:
                shares = [mib for name, mib in used if name == uuid]
                assert len(shares) == 1 or (None not in shares and len(shares) <= 2), used
            for admission in workers:
                for tag, held in admission._held.items():
                    wants_gpus = held.requirement is not None and held.requirement.gpu_count > 0
                    assert held.gpus or not wants_gpus or held.slot == "ending" or tag in over, held
        for admission in workers:
            admission.chosen_none()
        for owner, tag in tags:
            owner.child_gone(tag)
            owner.on_lease_ended(tag)
            owner.release(tag)
        assert locks_open(locks) == []
        for admission in workers:
            assert admission.free_gpus() == ("GPU-0", "GPU-1")
            assert admission.idle()
            admission._gpus._locks.close()  # type: ignore[union-attr]
