"""What templates of flowmesh/v1 and mloc/v1 mean: honoured, or refused with the reason; never dropped."""

from __future__ import annotations

import json

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.secrets import public_spec
from gpuflow.spec import pick, resolve
from gpuflow.spec.checking import canonical
from gpuflow.templates import parse

MODEL = {"source": {"type": "huggingface", "identifier": "example/chat-1b"}}
ASK = {"taskType": "inference", "model": MODEL, "data": {"type": "list", "items": ["Hello"]}}


def foreign(spec, version="flowmesh/v1"):
    return parse({"apiVersion": version, "metadata": {"name": "x"}, "spec": spec})


def spec_of(spec, version="flowmesh/v1"):
    return foreign(spec, version).stages[0].spec


def told(spec):
    return [f"{one.path}: {one.message}" for one in foreign(spec).warnings]


def mistakes(spec, version="flowmesh/v1"):
    with pytest.raises(InvalidTemplate) as caught:
        foreign(spec, version)
    return {one.path.removeprefix("spec."): one.message for one in caught.value.mistakes}


# -- models and engines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", [{"identifier": "smollm2-135m-instruct"}, {"type": "huggingface", "identifier": "smollm2-135m-instruct"}]
)
def test_the_bare_name_of_a_preset_is_the_preset(source):
    assert spec_of({**ASK, "model": {"source": source}})["model"]["source"]["type"] == "preset"


def test_an_id_of_the_hub_stays_one():
    source = {"identifier": "HuggingFaceTB/smollm2-135m-instruct"}
    assert spec_of({**ASK, "model": {"source": source}})["model"]["source"]["type"] == "huggingface"


def test_in_gpuflow_v1_the_type_that_is_written_counts():
    named = {"type": "huggingface", "identifier": "smollm2-135m-instruct"}
    assert canonical({**ASK, "model": {"source": named}})["model"]["source"]["type"] == "huggingface"
    del named["type"]
    assert canonical({**ASK, "model": {"source": named}})["model"]["source"]["type"] == "preset"


def test_the_section_of_an_engine_is_a_word_for_that_engine():
    on_transformers = spec_of({**ASK, "model": {**MODEL, "transformers": {"dtype": "float32"}}})
    assert on_transformers["engine"] == "transformers"

    on_vllm = {**ASK, "model": {**MODEL, "vllm": {"max_model_len": 512}}}
    assert "engine" not in spec_of(on_vllm)
    assert any("asks for vLLM" in line for line in told(on_vllm))
    assert told({**on_vllm, "engine": "vllm"}) == []


def test_arguments_of_the_models_configuration_go_there():
    vllm = {"rope_theta": 10000.0, "rope_scaling": {"factor": 2.0}, "hf_overrides": {"rope_theta": 5.0}}
    found = spec_of({**ASK, "engine": "vllm", "model": {**MODEL, "vllm": vllm}})
    assert found["model"]["vllm"] == {"hf_overrides": {"rope_theta": 5.0, "rope_scaling": {"factor": 2.0}}}


def test_a_field_of_one_engine_chooses_it_or_is_refused():
    ngrams = {"no_repeat_ngram_size": 3}
    assert spec_of({**ASK, "inference": ngrams})["engine"] == "transformers"
    grammar = {"structured_outputs": {"grammar": "root ::= a"}}
    assert spec_of({**ASK, "inference": grammar})["engine"] == "vllm"
    for field in ({"logprobs": 0}, {"bad_words": ["a"]}, {"logit_bias": {"1": 2.0}}):
        assert spec_of({**ASK, "inference": field}, "gpuflow/v1")["engine"] == "vllm"
        (name,) = field
        alone = mistakes({**ASK, "engine": "transformers", "inference": field}, "gpuflow/v1")
        assert "vllm engine alone" in alone[f"inference.{name}"]
    assert "engine" not in spec_of({**ASK, "inference": {"bad_words": [], "logprobs": None}})
    assert "engine" not in spec_of({**ASK, "inference": {"structured_outputs": {"regex": "a"}}})
    assert "no engine in common" in str(mistakes({**ASK, "inference": {**ngrams, **grammar}}))
    refused = mistakes({**ASK, "engine": "vllm", "inference": ngrams}, "gpuflow/v1")
    assert "transformers engine alone" in refused["inference.no_repeat_ngram_size"]
    refused = mistakes({**ASK, "engine": "transformers", "inference": grammar}, "gpuflow/v1")
    assert "vllm engine alone" in refused["inference.structured_outputs.grammar"]


# -- structured output ---------------------------------------------------------------------------------------------


def test_templates_are_a_schema_that_both_engines_keep_to():
    schema = {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
    found = spec_of({**ASK, "inference": {"templates": schema}})
    assert found["inference"]["structured_outputs"] == {"json": schema, "disable_any_whitespace": True}
    assert "engine" not in found
    assert "templates" not in found["inference"]


def test_named_fields_make_a_schema():
    fields = [
        {"name": "rating", "type": "int", "min": 0, "max": 10},
        {"name": "mood", "candidates": ["good", "bad"]},
        {"name": "on", "type": "date", "min": "2024-01-01"},
    ]
    asked = {**ASK, "inference": {"templates": fields}}
    assert spec_of(asked)["inference"]["structured_outputs"]["json"] == {
        "type": "object",
        "properties": {
            "rating": {"type": "integer", "minimum": 0, "maximum": 10},
            "mood": {"enum": ["good", "bad"]},
            "on": {"type": "string", "format": "date"},
        },
        "required": ["rating", "mood", "on"],
        "additionalProperties": False,
    }
    assert any("no such limit" in line for line in told(asked))


@pytest.mark.parametrize(
    ("templates", "path", "words"),
    [
        ([], "inference.templates", "a JSON schema"),
        ("x", "inference.templates", "a JSON schema"),
        ([{"type": "int"}], "inference.templates[0]", "with name"),
        ([{"name": "a", "type": "colour"}], "inference.templates[0].type", "int, integer"),
        ([{"name": "a", "candidates": []}], "inference.templates[0].candidates", "a list of values"),
        ([{"name": "a", "type": "int", "pattern": "x"}], "inference.templates[0].pattern", "unknown field"),
        ([{"name": "a", "type": "int"}, {"name": "a", "type": "int"}], "inference.templates[1].name", "another field"),
    ],
)
def test_wrong_templates_are_mistakes(templates, path, words):
    assert words in mistakes({**ASK, "inference": {"templates": templates}})[path]


# -- data ----------------------------------------------------------------------------------------------------------


def test_metadata_goes_with_its_item():
    data = {
        "type": "list",
        "items": ["a", [{"role": "user", "content": "b"}], "c"],
        "metadata": [{"id": 1}, {"id": 2}, {}],
    }
    assert spec_of({**ASK, "data": data})["data"] == {
        "type": "list",
        "items": [
            {"prompt": "a", "metadata": {"id": 1}},
            {"messages": [{"role": "user", "content": "b"}], "metadata": {"id": 2}},
            "c",
        ],
    }
    assert "a list of 1" in mistakes({**ASK, "data": {**data, "metadata": [{}]}})["data.metadata"]
    assert (
        "written out" in mistakes({**ASK, "data": {"type": "dataset", "url": "a/b", "metadata": [{}]}})["data.metadata"]
    )


def test_supervised_rows_are_learned_whole():
    data = {"dataset_name": "a/b", "prompt_column": "q", "response_column": "a"}
    tuned = spec_of({"taskType": "sft", "model": MODEL, "data": data})
    assert tuned["training"]["completion_only_loss"] is False
    assert tuned["data"]["separator"] == "\n\n"
    kept = spec_of(
        {
            "taskType": "sft",
            "model": MODEL,
            "data": {**data, "separator": " "},
            "training": {"completion_only_loss": True},
        }
    )
    assert (kept["data"]["separator"], kept["training"]["completion_only_loss"]) == (" ", True)
    texts = spec_of({"taskType": "sft", "model": MODEL, "data": {"dataset_name": "a/b", "text_column": "t"}})
    assert "completion_only_loss" not in texts["training"]
    ours = canonical(
        {
            "taskType": "sft",
            "model": MODEL,
            "data": {"type": "dataset", "url": "a/b", "columns": {"prompt": "q", "completion": "a"}},
        }
    )
    assert "training" not in ours


def graph(last, first=None):
    nodes = [{"name": "one", "spec": first or ASK}, {"name": "two", "dependsOn": ["one"], "spec": last}]
    return {"graph": {"nodes": nodes}}


def resolved(template, results):
    return canonical(resolve(template.stages[-1].spec, lambda reference: pick(results[reference.name], reference)))


ANSWERS = {"one": {"items": [{"output": "red"}, {"output": "blue"}]}}


@pytest.mark.parametrize("item", [{"node": "one", "path": "items.output"}, {"expr": "one.items.output"}])
def test_a_path_over_all_rows_is_a_list(item):
    template = foreign(graph({**ASK, "data": {"type": "list", "items": [item]}}))
    assert resolved(template, ANSWERS)["data"]["items"] == ["red", "blue"]
    assert template.stages[-1].depends_on == ("one",)
    beside = mistakes(graph({**ASK, "data": {"type": "list", "items": [item, "more"]}}))
    assert "the only item" in beside["graph.nodes[1].spec.data.items[0]"]
    columns = [{"label": "A", **item}, {"label": "B", "data": {"type": "list", "items": ["x"]}}]
    template = foreign(
        graph(
            {
                **ASK,
                "data": {
                    "type": "graph_template",
                    "template": {
                        "name": "format",
                        "columns": columns,
                        "options": {"format": {"messages": [{"role": "user", "content": "{A}/{B}"}]}},
                    },
                },
            }
        )
    )
    assert resolved(template, ANSWERS)["data"]["items"] == [
        [{"role": "user", "content": "red/x"}], [{"role": "user", "content": "blue/x"}],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Say {{one.items}} again", "write ${one.items}"),
        ("Say {{ one.result.items[0].output }}", "write ${one.result.items[0].output}"),
        ("Say ${one}", "whole result"),
        ("Say ${one.items[-1]}", "not a reference"),
    ],
)
def test_what_looks_like_a_reference_to_a_stage_is_never_sent_as_text(text, words):
    found = mistakes(graph({**ASK, "data": {"type": "list", "items": [text]}}))
    assert words in found["graph.nodes[1].spec.data.items[0]"]


def test_an_expression_is_refused_at_submit():
    found = mistakes(graph({**ASK, "data": {"type": "list", "items": [{"expr": "one.items + 1"}]}}))
    assert "leads into no result" in found["graph.nodes[1].spec.data.items[0].expr"]


# -- results -------------------------------------------------------------------------------------------------------


def test_an_archive_that_another_machine_fetches_is_named_by_its_url():
    tune = {"taskType": "lora_sft", "model": MODEL, "data": {"dataset_name": "a/b", "text_column": "t"}}
    asked = {
        **ASK,
        "model": {**MODEL, "adapters": [{"type": "lora", "path": "${one.final_lora_archive}"}]},
        "checkpoint": {"load": {"type": "http", "url": "${one.result.final_model_archive}"}},
    }
    found = foreign(graph(asked, tune)).stages[1].spec
    assert found["model"]["adapters"] == [{"type": "lora", "url": "${one.final_lora_archive_url}"}]
    assert found["checkpoint"]["load"]["url"] == "${one.result.final_model_archive_url}"


def test_a_type_that_its_place_contradicts_is_told():
    load = {"type": "path", "url": "http://h/x.tar.gz"}
    (line,) = told({**ASK, "checkpoint": {"load": load}})
    assert "path is named by path" in line


def test_results_json_is_another_name_of_ours():
    found = spec_of({**ASK, "output": {"artifacts": ["results.json", "logs"]}})
    assert found["output"]["aliases"] == {"results.json": "responses.json"}
    assert "aliases" not in spec_of({**ASK, "output": {"artifacts": ["logs"]}})["output"]


def test_a_url_is_called_back():
    destination = {
        "type": "http",
        "url": "http://host/hook",
        "method": "POST",
        "timeoutSec": 120,
        "headers": {"Content-Type": "application/json"},
    }
    asked = {**ASK, "output": {"destination": destination}}
    found = spec_of(asked)
    assert found["output"]["destination"] == {"type": "callback", "url": "http://host/hook"}
    assert found["notify"] == [
        {
            "on": ["succeeded"],
            "body": "result",
            "url": "http://host/hook",
            "method": "POST",
            "timeoutSec": 60.0,
            "headers": {"Content-Type": "application/json"},
        }
    ]
    assert canonical(found) == found
    assert any("60 s at most" in line for line in told(asked))


def test_the_path_of_a_callback_is_not_shown_to_others():
    shown = public_spec(
        canonical({**ASK, "output": {"destination": {"type": "callback", "url": "https://h/key-of-it"}}})
    )
    assert "key-of-it" not in str(shown)
    assert shown["output"]["destination"]["url"] == shown["notify"][0]["url"] == "https://h/***"


def test_one_file_of_all_rows_is_not_made_by_several_tasks():
    export = {"jsonl_export": {"path": "a.jsonl", "fields": {"a": "output"}}}
    refused = mistakes({**ASK, "postprocess": export, "parallel": {"max_shards": 2}})
    assert "one file of all rows" in refused["postprocess.jsonl_export"]


def test_a_mistake_of_a_callback_stands_where_it_was_written():
    destination = {"type": "http", "url": "http://host/hook", "method": "DELETE"}
    assert "output.destination.method" in mistakes({**ASK, "output": {"destination": destination}})


def test_without_a_url_it_is_said_where_results_go():
    asked = {**ASK, "output": {"destination": {"type": "http", "timeoutSec": 1800}}}
    (line,) = told(asked)
    assert "gpuflow run` keeps them" in line


@pytest.mark.parametrize(
    ("destination", "path", "words"),
    [
        ({"type": "callback"}, "output.destination.url", "is missing"),
        ({"type": "callback", "url": "http://h", "path": "/x"}, "output.destination.path", "not of a callback"),
        ({"type": "http", "url": "http://h", "retries": 3}, "output.destination.retries", "type: callback"),
        ({"type": "callback", "url": "http://h", "secret": "plain-key-1"}, "output.destination.secret", "plain text"),
    ],
)
def test_wrong_destinations_of_ours(destination, path, words):
    assert words in mistakes({**ASK, "output": {"destination": destination}}, "gpuflow/v1")[path]


# -- what is refused -----------------------------------------------------------------------------------------------


def test_images_are_refused_for_what_they_are():
    see = {
        "taskType": "embedding",
        "model": {"source": {"identifier": "example/see"}, "transformers": {"mode": "visual-embedding"}},
        "data": {"type": "list", "items": ["http://h/a.png"]},
    }
    tell = {
        **ASK,
        "model": {**MODEL, "vllm": {"enable_mm_embeds": True}},
        "data": {
            "type": "graph_template",
            "template": {
                "name": "format",
                "options": {"format": {"messages": [{"role": "user", "content": "Describe it."}]}},
            },
            "image_embedding": {"node": "one", "path": "embedding_file"},
        },
    }
    found = mistakes(graph(tell, see))
    assert set(found) == {
        "graph.nodes[0].spec.model.transformers.mode",
        "graph.nodes[1].spec.model.vllm.enable_mm_embeds",
        "graph.nodes[1].spec.data.image_embedding",
    }
    assert all("multimodal messages are not supported" in message for message in found.values())


def test_parts_of_messages_that_are_no_text_are_refused():
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]}
    ]
    found = mistakes({**ASK, "data": {"type": "list", "items": [chat]}}, "gpuflow/v1")
    assert "not supported" in found["data.items[0][0].content[1].type"]


def test_mistakes_and_warnings_come_in_one_report():
    with pytest.raises(InvalidTemplate) as caught:
        foreign({**ASK, "inference": {"temperature": -1, "colour": "red"}})
    assert [one.path for one in caught.value.mistakes] == ["spec.inference.temperature"]
    assert [one.path for one in caught.value.warnings] == ["spec.inference.colour"]
    assert "warning: template: spec.inference.colour" in str(caught.value)


@pytest.mark.parametrize("accelerators", ["A100:H100:2", "A100:99999999999999999999", ["A100:1", "A100:1"]])
def test_what_is_asked_of_machines_is_checked_with_the_rest(accelerators):
    found = mistakes({**ASK, "resources": {"accelerators": accelerators}}, "gpuflow/v1")
    assert list(found) == ["resources.accelerators"]


def test_nothing_of_it_is_lost_when_a_spec_is_read_again():
    asked = {
        **ASK,
        "model": {**MODEL, "transformers": {"dtype": "float32"}},
        "inference": {"no_repeat_ngram_size": 2},
        "postprocess": {"jsonl_export": {"path": "rows.jsonl", "fields": {"a": "output"}}},
        "output": {"destination": {"type": "http", "url": "http://h/x"}, "artifacts": ["results.json"]},
    }
    found = spec_of(asked)
    assert canonical(json.loads(json.dumps(found))) == found


# -- ppo -----------------------------------------------------------------------------------------------------------


def test_a_stop_that_ppo_has_not_is_refused_and_its_limit_alone_changes_nothing():
    task = {**ASK, "taskType": "ppo", "reward_model": {"type": "sentiment"}, "data": {"prompts": ["a"]}}
    off = {"target_kl": 0.1, "early_stopping": False, "padding_side": "left", "steps": 3}
    assert told({**task, "training": off}) == []
    assert set(mistakes({**task, "training": {**off, "early_stopping": True}})) == {"training.early_stopping"}
    assert set(mistakes({**task, "training": {**off, "padding_side": "right"}})) == {"training.padding_side"}
    assert any("target_kl" in line for line in told({**task, "training": {"target_kl": 0.1}}))


SLIPS = [
    ({"taskType": "echo", "timout": 30}, "timout"),
    ({"taskType": "echo", "resources": {"hardware": {"gpu": {"cunt": 8}}}}, "resources.hardware.gpu.cunt"),
    ({"taskType": "echo", "output": {"destinaton": {"type": "local"}}}, "output.destinaton"),
    ({"taskType": "echo", "hyperopt": {"trials": 3}}, "hyperopt"),
    ({**ASK, "data": {"itmes": ["a"], "items": ["b"]}}, "data.itmes"),
    ({**ASK, "inference": {"temprature": 0}}, "inference.temprature"),
]


@pytest.mark.parametrize(("spec", "path"), SLIPS, ids=[path for _, path in SLIPS])
def test_a_slip_in_a_field_is_a_mistake_in_templates_of_others_too(spec, path):
    assert path in mistakes(spec)


@pytest.mark.parametrize("slip", ["dependOn", "conditon", "wehn"])
def test_a_field_of_a_node_that_is_not_known_is_a_mistake(slip):
    nodes = [{"name": "a"}, {"name": "b", slip: ["a"]}]
    assert f"graph.nodes[1].{slip}" in mistakes({"taskType": "echo", "graph": {"nodes": nodes}})
