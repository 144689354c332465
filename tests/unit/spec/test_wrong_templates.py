"""Wrong templates: each gives one report that names the right path, cause and mend; never another exception."""

from __future__ import annotations

import pytest

HEAD = "apiVersion: gpuflow/v1\n"
MODEL = "model: {source: {identifier: m}}"


def task(body: str) -> str:
    return HEAD + "spec:\n" + "".join(f"  {line}\n" for line in body.splitlines())


def sft(training: str) -> str:
    return task(f"taskType: sft\n{MODEL}\ndata: {{url: some/set}}\ntraining: {{{training}}}")


def ask(inference: str) -> str:
    return task(f"taskType: inference\n{MODEL}\ndata: {{items: [hi]}}\ninference: {{{inference}}}")


def echo(field: str) -> str:
    return task(f"taskType: echo\n{field}")


def grpo(reward: str) -> str:
    return task(f"taskType: grpo\n{MODEL}\ndata: {{prompts: [hi]}}\nreward_model: {{{reward}}}")


def stages(*entries: str) -> str:
    return task("taskType: echo\nstages:\n" + "\n".join(f"  - {entry}" for entry in entries))


def graph(*entries: str) -> str:
    return task("taskType: echo\ngraph:\n  nodes:\n" + "\n".join(f"    - {entry}" for entry in entries))


WRONG = [
    # text, path, a part of the cause or the mend
    ("", "", "empty"),
    ("# only a comment\n", "", "empty"),
    ("- a\n- b\n", "", "a list of 2"),
    ("just words", "", "a template is a mapping"),
    ("a: 1\n\tb: 2\n", "", "tab"),
    ("a: [1, 2\nb: 3\n", "", "not valid YAML"),
    ('{"apiVersion": "gpuflow/v1",}', "", "not valid JSON"),
    ('{"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "timeout": NaN}}', "", "NaN"),
    ("a: 1\n---\nb: 2\n", "", "second document"),
    ("a: !!python/object/apply:os.system [ls]\n", "a", "!!python/object/apply:os.system is not allowed"),
    ("a: &x [*x]\n", "a[0]", "names nothing finished"),
    (HEAD + "spec: {taskType: echo}\nspec: {taskType: echo}\n", "spec", "given twice, in lines 2 and 3"),
    ('{"taskType": "echo",\n "taskType": "echo"}', "taskType", "given twice, in lines 1 and 2"),
    ("? [a]\n: b\n", "", "a key must be text"),
    ("spec: {taskType: echo}", "apiVersion", "write apiVersion: gpuflow/v1"),
    ("apiVersion: gpuflow/v2\nspec: {taskType: echo}", "apiVersion", "did you mean 'gpuflow/v1'"),
    ("apiVersion: 1\nspec: {taskType: echo}", "apiVersion", "it must be gpuflow/v1"),
    (HEAD, "spec", "required and missing"),
    (HEAD + "spec: []", "spec", "must be a mapping"),
    (HEAD + "kind: [x]\nspec: {taskType: echo}", "kind", "must be text"),
    (HEAD + "metadat: {}\nspec: {taskType: echo}", "metadat", "did you mean 'metadata'"),
    (HEAD + "metadata: {nam: x}\nspec: {taskType: echo}", "metadata.nam", "did you mean 'name'"),
    (HEAD + "metadata: words\nspec: {taskType: echo}", "metadata", "must be a mapping"),
    (task(MODEL), "spec.taskType", "required and missing"),
    (grpo("type: model"), "spec.reward_model", "needs identifier, path or url"),
    (grpo("type: model, path: /a, url: 'http://h/a'"), "spec.reward_model", "path and url, which contradict"),
    (grpo("type: function, url: 'http://h/a'"), "spec.reward_model", "is a function, which is no url"),
    (grpo("identifier: a, headers: {Authorization: '${env:A}'}"), "spec.reward_model", "has headers"),
    (task("taskType: container\ncontainer: {image: 'a:1', request: 1}"), "spec.container", "only a preset"),
    (task("taskType: infrence"), "spec.taskType", "did you mean 'inference'"),
    (task("taskType: [sft]"), "spec.taskType", "must be echo"),
    (task("taskType: inference\ndata: {items: [hi]}"), "spec.model", "needs model.source"),
    (task(f"taskType: inference\n{MODEL}"), "spec.data", "needs data"),
    (task("taskType: inference\nmodel: {vllm: {}}\ndata: {items: [hi]}"), "spec.model", "needs model.source"),
    (task("taskType: inference\nmodel: gpt2\ndata: {items: [hi]}"), "spec.model", "must be a mapping"),
    (task("taskType: command"), "spec.command", "needs command"),
    (task("taskType: container\ncontainer: {command: ls}"), "spec.container", "needs image or preset"),
    (task("taskType: container\ncontainer: {image: A B}"), "spec.container.image", "is no image reference"),
    (task("taskType: container\ncontainer: {image: a, preset: b}"), "spec.container", "needs image or preset"),
    (task('taskType: container\ncontainer: {image: a, mounts: ["/a:/b:rw"]}'), "spec.container.mounts[0]", "read-only"),
    (task('taskType: container\ncontainer: {image: a, mounts: ["a:/b"]}'), "spec.container.mounts[0]", "is no mount"),
    (task("taskType: container\ncontainer: {image: a, network: host}"), "spec.container.network", "none or bridge"),
    (task("taskType: container\ncontainer: {image: a, user: root}"), "spec.container.user", "unknown field"),
    (task("taskType: command\ncommand: {command: []}"), "spec.command.command", "a list of arguments"),
    (task("taskType: command\ncommand: {command: ls, project: a, path: /b}"), "spec.command", "project and path"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{items: [hi]}}\nlora: {{r: 4}}"), "spec.lora", "not used by taskType"),
    (task(f"taskType: sft\n{MODEL}\ndata: {{url: a/b}}\nlora: {{r: 4}}"), "spec.lora", "belongs to dpo"),
    (echo("colour: blue"), "spec.colour", "unknown field"),
    (echo("priorty: 3"), "spec.priorty", "did you mean 'priority'"),
    (echo("priority: 10"), "spec.priority", "at most 9"),
    (echo("priority: high"), "spec.priority", "a whole number"),
    (echo("priority: true"), "spec.priority", "must be a number"),
    (echo("merge: sometimes"), "spec.merge", "auto, always or never"),
    (echo("target: moon"), "spec.target", "worker, local or auto"),
    (echo("timeout: soon"), "spec.timeout", "90s, 2h or 1h30m"),
    (echo("timeout: 0"), "spec.timeout", "out of range"),
    (echo("timeout: 99999d"), "spec.timeout", "ten years"),
    (echo("sloSeconds: -1"), "spec.sloSeconds", "above 0"),
    (echo("resultTtlSeconds: .inf"), "spec.resultTtlSeconds", "finite"),
    (echo("retry: {max_attempts: 0}"), "spec.retry.max_attempts", "at least 1"),
    (echo("retry: {backoff: 1}"), "spec.retry.backoff", "backoff_seconds"),
    (echo("parallel: {enabled: perhaps}"), "spec.parallel.enabled", "true or false"),
    (echo("parallel: {max_shards: 5000}"), "spec.parallel.max_shards", "at most 1024"),
    (echo("env: {1x: a}"), "spec.env.1x", "no name of an environment variable"),
    (echo("env: {REDIS_URL: x}"), "spec.env.REDIS_URL", "set by gpuflow"),
    (echo("secrets: [CUDA_VISIBLE_DEVICES]"), "spec.secrets[0]", "set by gpuflow"),
    (echo("notify: [{on: [done], url: x}]"), "spec.notify[0].on[0]", "succeeded, failed"),
    (echo("notify: [{on: [failed]}]"), "spec.notify[0].url", "required"),
    (echo("output: {artifacts: [../../etc/passwd]}"), "spec.output.artifacts[0]", "inside the output folder"),
    (echo("output: {destination: {type: ftp}}"), "spec.output.destination.type", "local, http, s3 or callback"),
    (echo("echo: {sleep_seconds: -2}"), "spec.echo.sleep_seconds", "at least 0"),
    (echo("echo: {exit_code: 999}"), "spec.echo.exit_code", "at most 255"),
    (echo("resources: {hardware: {gpu: {count: 2000}}}"), "spec.resources.hardware.gpu.count", "at most 1024"),
    (echo("resources: {hardware: {gpu: {count: 2, fraction: 0.5}}}"),
     "spec.resources.hardware.gpu", "a share is of one"),
    (echo("resources: {hardware: {memory: 32}}"), "spec.resources.hardware.memory", "such as 32Gi"),
    (echo("resources: {hardware: {cpu: many}}"), "spec.resources.hardware.cpu", "number of CPUs"),
    (echo("resources: {hardware: {gpu: {memory: big}}}"), "spec.resources.hardware.gpu.memory", "such as 32Gi"),
    (echo("resources: {accelerators: [A100:1, '']}"), "spec.resources.accelerators", "no ask for accelerators"),
    (echo("resources: {accelerator: A100}"), "spec.resources.accelerator", "did you mean 'accelerators'"),
    (echo("resources: {replicas: 0}"), "spec.resources.replicas", "at least 1"),
    (sft("max_steps: -5"), "spec.training.max_steps", "must be from 1"),
    (sft("learning_rate: 100"), "spec.training.learning_rate", "to 10"),
    (sft("learning_rate: .nan"), "spec.training.learning_rate", "finite"),
    (sft("learning_rate: fast"), "spec.training.learning_rate", "it must be a number"),
    (sft("batch_size: 0"), "spec.training.batch_size", "from 1"),
    (sft("batch_size: 2.5"), "spec.training.batch_size", "a whole number"),
    (sft("batch_size: true"), "spec.training.batch_size", "a whole number"),
    (sft("batch_size: 2, per_device_train_batch_size: 4"),
     "spec.training.per_device_train_batch_size", "'batch_size' are"),
    (sft("learning_rte: 1"), "spec.training.learning_rte", "did you mean 'learning_rate'"),
    (sft("output_dir: /x"), "spec.training.output_dir", "set by gpuflow"),
    (sft("bf16: perhaps"), "spec.training.bf16", "true or false"),
    (sft("lr_scheduler_type: cosin"), "spec.training.lr_scheduler_type", "did you mean 'cosine'"),
    (sft("report_to: wandbb"), "spec.training.report_to", "did you mean 'wandb'"),
    (sft("seed: 184467440737095516160"), "spec.training.seed", "64 bits"),
    (ask("temperature: -0.1"), "spec.inference.temperature", "from 0"),
    (ask("max_tokens: 0"), "spec.inference.max_tokens", "from 1"),
    (ask("max_tokens: 5, max_new_tokens: 6"), "spec.inference.max_new_tokens", "keep one"),
    (ask("top_p: 1.5"), "spec.inference.top_p", "to 1"),
    (ask("stop: [1]"), "spec.inference.stop", "a list of texts"),
    (ask("do_sample: false, temperature: 0.7"), "spec.inference.do_sample", "keep one"),
    (task("taskType: inference\nmodel: {source: {identifier: m}, vllm: {tensor_parallel: 2}}\ndata: {items: [a]}"),
     "spec.model.vllm.tensor_parallel", "tensor_parallel_size"),
    (task("taskType: inference\nmodel: {source: {identifier: m}, adapters: [{type: lora}]}\ndata: {items: [a]}"),
     "spec.model.adapters[0]", "needs url or path"),
    (task("taskType: inference\nmodel: {source: {identifier: 7}}\ndata: {items: [a]}"),
     "spec.model.source.identifier", "quotes"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{items: []}}"), "spec.data.items", "empty list"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{items: [a, null]}}"), "spec.data.items[1]", "is empty"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{type: jsonl, path: a, upload: b}}"), "spec.data", "path and upload"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{column: a}}"), "spec.data", "where the data is"),
    (task(f"taskType: dpo\n{MODEL}\ndata: {{preferences: [{{prompt: a, chosen: b}}]}}"),
     "spec.data.preferences[0]", "rejected"),
    (task(f"taskType: sft\n{MODEL}\ndata: {{url: a/b, eval_split: 3}}"), "spec.data.eval_split", "a share"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{type: graph_template, template: {{columns: []}}}}"),
     "spec.data.template.columns", "at least 1"),
    (echo("stages: []"), "spec.stages", "give 1 to"),
    (echo("stages: {a: 1}"), "spec.stages", "must be a list"),
    (echo("graph: {edges: []}"), "spec.graph", "nodes alone"),
    (echo("stages: [{name: a}]\ngraph: {nodes: [{name: b}]}"), "spec.graph", "keep one of them"),
    (stages("{spec: {}}"), "spec.stages[0].name", "required"),
    (stages("words"), "spec.stages[0]", "a stage is a mapping"),
    (stages("{name: -a}"), "spec.stages[0].name", "no name of a stage"),
    (stages("{name: 'a b'}"), "spec.stages[0].name", "no name of a stage"),
    (stages("{name: a}", "{name: a}"), "spec.stages[1].name", "name of another stage"),
    (stages("{name: a, taskType: echo}"), "spec.stages[0].taskType", "move it under spec"),
    (stages("{name: a, dependsOn: [b]}"), "spec.stages[0].dependsOn[0]", "is no stage"),
    (graph("{name: a, dependsOn: [a]}"), "spec.graph.nodes[0].dependsOn[0]", "depend on itself"),
    (graph("{name: a, dependsOn: [c]}", "{name: b, dependsOn: [a]}", "{name: c, dependsOn: [b]}"),
     "spec.graph.nodes[0].dependsOn", "a -> c -> b -> a"),
    (stages("{name: a, spec: {echo: {message: '${b.x}'}}}", "{name: b}"),
     "spec.stages[0].spec.echo.message", "not upstream"),
    (graph("{name: a, spec: {echo: {message: '${b.x}'}}}", "{name: b, spec: {echo: {message: '${a.x}'}}}"),
     "spec.graph.nodes[1].spec.echo.message", "not upstream"),
    (stages("{name: a, spec: {echo: {message: '${a.x}'}}}"), "spec.stages[0].spec.echo.message", "its own stage"),
    (stages("{name: tune}", "{name: b, spec: {echo: {message: '${tun.x}'}}}"),
     "spec.stages[1].spec.echo.message", "'tune'"),
    (stages("{name: a}", "{name: b, spec: {echo: {message: '${a}'}}}"),
     "spec.stages[1].spec.echo.message", "${a.result}"),
    (stages("{name: a}", "{name: b, spec: {echo: {message: 'x ${a.b'}}}"),
     "spec.stages[1].spec.echo.message", "not closed"),
    (echo("echo: {message: '${HOME}'}"), "spec.echo.message", "${env:HOME}"),
    (echo("echo: {message: '${a.b}'}"), "spec.echo.message", "no stages to refer to"),
    (stages("{name: a, matrix: {}}"), "spec.stages[0].matrix", "is empty"),
    (stages("{name: a, matrix: {echo.steps: 3}}"), "spec.stages[0].matrix.echo.steps", "must be a list"),
    (stages("{name: a, matrix: {echo.steps: [1, -1]}}"), "spec.stages[0].matrix.echo.steps[1]", "at least 0"),
    (stages("{name: a, matrix: {'echo..steps': [1]}}"), "spec.stages[0].matrix.echo..steps", "is not a path"),
    (stages(f"{{name: a, matrix: {{priority: {list(range(10))}, echo.steps: {list(range(200))}}}}}"),
     "spec.stages[0].matrix", "makes 2000 tasks"),
    (task(f"taskType: sft\n{MODEL}\ndata: {{items: [a]}}\ntraining: {{warmup_ratio: 1.0}}"),
     "spec.training.warmup_ratio", "a ratio is below 1"),
    (stages("{name: a, condition: '${b.x} == 1'}"), "spec.stages[0].condition", "a condition is a mapping"),
    (stages("{name: a}", "{name: b, condition: {value: x, equals: 1}}"), "spec.stages[1].condition.value", "one refer"),
    (stages("{name: a}", "{name: b, condition: {value: '${a.x}'}}"), "spec.stages[1].condition", "compares with"),
    (stages("{name: a}", "{name: b, condition: {value: '${a.x}', equal: 1}}"),
     "spec.stages[1].condition.equal", "equals"),
    (stages("{name: a}", "{name: b, condition: {value: '${c.x}', equals: 1}}"),
     "spec.stages[1].condition.value", "there is no stage 'c'"),
    (stages("{name: a, condition: {value: '${b.x}', equals: 1}}", "{name: b}"),
     "spec.stages[0].condition.value", "not upstream"),
    (stages("{name: a}", "{name: b, condition: {any: []}}"), "spec.stages[1].condition.any", "a list of conditions"),
    (stages("{name: a}", "{name: b, condition: {not: {value: '${a.x}', exists: 1}}}"),
     "spec.stages[1].condition.not.exists", "true or false"),
    (stages("{name: a}", "{name: b, condition: {any: [{value: '${a.x}', at_least: [1]}]}}"),
     "spec.stages[1].condition.any[0].at_least", "a number or text"),
    (stages("{name: a}", "{name: b, condition: {any: [{value: '${a.x}', exists: true}], equals: 1}}"),
     "spec.stages[1].condition", "under all"),
    (task(f"taskType: inference\n{MODEL}\ndata: {{items: [a]}}\ncheckpoint: {{load: {{path: /x}}, merge_first: true}}"),
     "spec.checkpoint.merge_first", "for trainings that begin from an adapter"),
    (stages("{name: a, spec: {target: local}}", "{name: b}"), "spec.stages[1].spec.target", "runs in one place"),
    (stages("{name: a}", "{name: b, spec: {echo: {output: {'${a.x}': 1}}}}"),
     "spec.stages[1].spec.echo.output", "keys are not replaced"),
    (stages("{name: a, matrix: {echo.steps: [1, 2], echo: [{message: a}]}}"),
     "spec.stages[0].matrix.echo", "one would replace the other"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "path", "words"), WRONG, ids=[f"{i}-{row[1] or 'file'}" for i, row in enumerate(WRONG)]
)
def test_the_report_names_path_and_cause(report_of, text, path, words):
    error = report_of(text)

    assert any(one.path == path and words in one.message for one in error.mistakes), str(error)
    mistakes = [line for line in str(error).splitlines() if not line.startswith("warning: ")]
    assert all(line.startswith("wrong.yaml") for line in mistakes)
    assert len(mistakes) == len(error.mistakes)
    assert len(str(error).splitlines()) == len(error.mistakes) + len(error.warnings)


def test_there_are_enough_of_them():
    assert len(WRONG) >= 45


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: 1\n---\nb: 2\n", 2), ("a: 1\nb:\n\tc: 2\n", 3), ("a: 1\nb: [1, 2\nc: 3\n", 3), ("a: 1\nb: '\0'\n", 2)],
)
def test_what_is_wrong_with_a_whole_file_has_its_line(report_of, text, line):
    (mistake,) = report_of(text).mistakes
    assert (mistake.path, mistake.line) == ("", line)


def test_one_report_lists_every_mistake_with_its_line(report_of):
    error = report_of(
        """\
apiVersion: gpuflow/v1
spec:
  model: {source: {identifier: m}}
  training:
    batch_size: -4
  stages:
    - name: tune
      spec:
        taskType: sft
        data: {url: a/b}
        trainin: {}
    - name: ask
      spec:
        taskType: inference
        data: {items: ["${tun.result.x}"]}
        inference:
          max_tokens: none
"""
    )

    upstream = "${tun.result.x}: there is no stage 'tun'; did you mean 'tune'?"
    assert str(error).splitlines() == [
        "wrong.yaml:5: spec.training.batch_size: is -4; it must be from 1 to 65536",
        "wrong.yaml:11: spec.stages[0].spec.trainin: unknown field; did you mean 'training'?",
        f"wrong.yaml:15: spec.stages[1].spec.data.items[0]: {upstream}",
        "wrong.yaml:17: spec.stages[1].spec.inference.max_tokens: is 'none'; it must be a whole number",
    ]


def test_values_that_may_be_secret_are_not_shown(report_of):
    error = report_of(
        task(
            "taskType: rag\nquery: a\nembedding: {model: m}\n"
            "qdrant: {url: http://u, collection: c, api_key: [s3cr3t]}\nenv: {K: [s3cr3t]}"
        )
    )

    assert len(error.mistakes) == 2
    assert "s3cr3t" not in str(error)


def test_a_report_of_thousands_is_cut_but_holds_all(report_of):
    error = report_of(task("taskType: echo\n" + "\n".join(f"field{n}: 1" for n in range(500))))

    assert len(error.mistakes) == 500
    assert str(error).splitlines()[-1] == "wrong.yaml: and 400 more mistakes"
