# %% [markdown]
# gpuflow from a notebook: submit, watch, look at results, try a sweep. Each block is a cell (Jupyter, VS Code, Spyder).
# Needs a fleet: `gpuflow up` in a terminal of this machine, or REDIS_URL.
#
# Plain calls wait, also where the notebook has a running event loop; Interrupt ends the wait and cancels nothing.

# %%
from gpuflow import PipelineRun, TaskFailed, explain, get, submit, submit_pipeline

# %% One task. `get` waits and returns its result.
task = submit({"taskType": "echo", "echo": {"output": 42}, "resources": {"accelerators": "cpu"}})
print("output:", task.get(timeout=60)["output"])

# %% A shipped pipeline, with progress below the cell.
run = submit_pipeline("graph").wait(timeout=60, progress=True)
joined = run["join"].result
assert joined is not None
print("joined:", joined["output"])

# %% The kernel was restarted? The id is enough to go on.
again = get(run.id)
assert isinstance(again, PipelineRun)
print("again:", again.state, [stage["name"] for stage in again.status()["stages"]])

# %% Why does it wait, or where would it run?
print("explained:", explain("echo")[0].to_lines()[0])

# %% A sweep as a dict: one task for each combination, read as a table.
rates = [0.1, 0.01, 0.001]
sweep = submit_pipeline(
    {
        "apiVersion": "gpuflow/v1",
        "metadata": {"name": "sweep"},
        "spec": {
            "taskType": "echo",
            "resources": {"accelerators": "cpu"},
            "stages": [{"name": "try", "matrix": {"echo.output.rate": rates}, "spec": {"echo": {"output": {}}}}],
        },
    }
).wait(timeout=60)
for tried in sweep["try"].tasks:
    print("tried:", tried.result["output"])

# %% A failure is an exception with its type, cause and advice.
failing = {"taskType": "echo", "echo": {"fail": {"type": "BadInput", "message": "no such column: age"}}}
try:
    submit(failing | {"resources": {"accelerators": "cpu"}}).get(timeout=60)
except TaskFailed as error:
    print("failed:", error.details["type"], "-", error)
