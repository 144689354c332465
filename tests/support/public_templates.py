"""The public templates of mlsys-io/FlowMesh (examples/templates) of the task types that gpuflow has, as facts.

Each has the fields and the numbers of its file, with texts of ours in place of theirs; `runnable` swaps what a machine
without GPU and network lacks. tests/unit/spec/test_public_templates.py says how each is read, and what is told of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

TINY, LLAMA_1B, LLAMA_3B = (
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
)
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.1"
MINISTRAL = "mistralai/Ministral-3-3B-Instruct-2512"
_LOCAL: Final = {"destination": {"type": "local"}, "artifacts": ["results.json", "logs"]}
_HTTP: Final = {"destination": {"type": "http"}, "artifacts": ["results.json"]}
_WITH_TOKEN: Final = {
    "destination": {
        "type": "http",
        "method": "POST",
        "timeoutSec": 15,
        "headers": {"Authorization": "Bearer dev-token"},
    },
    "artifacts": ["results.json", "final_model"],
}
_CHECKPOINTS: Final = {"destination": {"type": "local"}, "artifacts": ["results.json", "logs", "artifacts/checkpoints"]}
_QUESTIONS: Final = {
    "type": "dataset",
    "url": "openai/gsm8k",
    "name": "main",
    "split": "train[:1%]",
    "column": "question",
    "shuffle": True,
    "seed": 42,
}
_CHATS: Final = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the red car?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the blue lamp?"}],
]
_PAIRS: Final = [
    {"prompt": f"Where is the {color} {thing}?", "chosen": f"The {color} {thing} is here.", "rejected": "No idea."}
    for color, thing in (("red", "car"), ("green", "lamp"), ("blue", "house"), ("red", "lamp"), ("green", "car"))
]
_PROMPTS: Final = [
    f"Where is the {color} {thing}?" for color in ("red", "green") for thing in ("car", "lamp", "house", "dog")
]
_LORA: Final = {
    "r": 16,
    "alpha": 32,
    "dropout": 0.05,
    "bias": "none",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "task_type": "CAUSAL_LM",
    "use_rslora": False,
}
_VLLM: Final = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "trust_remote_code": True}


def _hub(identifier: str, **more: Any) -> dict[str, Any]:
    return {"source": {"type": "huggingface", "identifier": identifier, **more}}


def _machine(cpu: Any, memory: str, *, gpus: int = 0, vram: str | None = None, **more: Any) -> dict[str, Any]:
    gpu = {"type": "any", "count": gpus, **({"memory": vram} if vram else {})}
    return {"hardware": {"cpu": cpu, "memory": memory, **({"gpu": gpu} if gpus else {})}, **more}


def _math(separator: str, split: str, most: int) -> dict[str, Any]:
    return {
        "dataset_name": "openai/gsm8k",
        "config_name": "main",
        "split": split,
        "prompt_column": "question",
        "response_column": "answer",
        "separator": separator,
        "max_samples": most,
    }


def _code() -> dict[str, Any]:
    return {
        "dataset_name": "openai/openai_humaneval",
        "split": "test",
        "prompt_column": "prompt",
        "response_column": "canonical_solution",
        "separator": "\n\nSolution:\n",
        "max_samples": 164,
    }


def _supervised(epochs: int, batch: int, steps: int, rate: float, length: int, **more: Any) -> dict[str, Any]:
    return {
        "num_train_epochs": epochs,
        "batch_size": batch,
        "gradient_accumulation_steps": steps,
        "learning_rate": rate,
        "max_seq_length": length,
        "packing": False,
        **more,
    }


def _sharded(identifier: str) -> dict[str, Any]:
    return {
        "taskType": "inference",
        "sloSeconds": 10,
        "parallel": {"enabled": True, "max_shards": 8},
        "resources": _machine("8", "32Gi", gpus=1, replicas=1),
        "model": {**_hub(identifier, revision="main"), "vllm": _VLLM},
        "data": _QUESTIONS,
        "inference": {"max_tokens": 128, "temperature": 0.7, "top_p": 0.95},
        "output": _LOCAL,
    }


def _dpo(identifier: str, resources: dict[str, Any], output: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {
        "taskType": "dpo",
        "resources": resources,
        "model": _hub(identifier, revision="main", trust_remote_code=False),
        "data": {"preferences": _PAIRS},
        "training": {
            "learning_rate": "5e-7",
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 1,
            "save_freq": 500,
            "fp16": False,
            "bf16": True,
            **training,
        },
        "output": output,
    }


def _ppo(identifier: str, resources: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {
        "taskType": "ppo",
        "resources": resources,
        "model": _hub(identifier, revision="main", trust_remote_code=False),
        "reward_model": {"identifier": "cardiffnlp/twitter-roberta-base-sentiment-latest", "type": "sentiment"},
        "data": {"prompts": _PROMPTS},
        "training": {
            "learning_rate": 3.0e-6,
            "mini_batch_size": 1,
            "target_kl": 0.1,
            "seed": 42,
            "padding_side": "left",
            "save_freq": 25,
            "fp16": False,
            "bf16": True,
            **training,
        },
        "generation": {"max_new_tokens": 128, "temperature": 0.7},
        "output": _CHECKPOINTS,
    }


def _echo(*items: Any) -> dict[str, Any]:
    return {"taskType": "echo", "data": {"type": "list", "items": list(items)}}


def _draft(prompt: str, temperature: float) -> dict[str, Any]:
    return {
        "resources": _machine("8", "16Gi"),
        "model": {
            **_hub(LLAMA_1B, revision="main"),
            "transformers": {
                "device_map": "cpu",
                "dtype": "float32",
                "trust_remote_code": False,
                "low_cpu_mem_usage": True,
            },
        },
        "inference": {"system_prompt": prompt, "temperature": temperature, "top_p": 0.9},
        "output": _LOCAL,
    }


#: Name of the file -> its spec.
TEMPLATES: Final[dict[str, dict[str, Any]]] = {
    "echo_local": {**_echo("hello", "second"), "resources": _machine("1", "1Gi"), "output": _LOCAL},
    "echo_three_node_graph": {
        "taskType": "echo",
        "resources": _machine("1", "1Gi"),
        "graph": {
            "nodes": [
                {"name": "echo-a", "spec": _echo("from a")},
                {"name": "echo-b", "spec": _echo("from b")},
                {
                    "name": "echo-merge",
                    "dependsOn": ["echo-a", "echo-b"],
                    "spec": _echo(
                        {"node": "echo-a", "path": "items[0].output"}, {"node": "echo-b", "path": "items[0].output"}
                    ),
                },
            ]
        },
        "output": _HTTP,
    },
    "conditional_echo_test": {
        "taskType": "echo",
        "resources": _machine(1, "256Mi"),
        "graph": {
            "nodes": [
                {"name": "echo-upstream", "spec": _echo("skip-me")},
                {
                    "name": "echo-conditional",
                    "dependsOn": ["echo-upstream"],
                    "spec": {
                        **_echo("never"),
                        "condition": {"node": "echo-upstream", "field": "items.0.output", "equals": "run-me"},
                    },
                },
                {
                    "name": "echo-always",
                    "dependsOn": ["echo-upstream", "echo-conditional"],
                    "spec": _echo({"node": "echo-upstream", "path": "items[0].output"}),
                },
            ]
        },
        "output": _HTTP,
    },
    "inference_hf_tiny": {
        "taskType": "inference",
        "resources": _machine("2", "4Gi", replicas=1),
        "model": {
            **_hub("sshleifer/tiny-gpt2", revision="main"),
            "transformers": {"device_map": "auto", "trust_remote_code": False},
        },
        "data": {"type": "list", "items": ["Where is the red car?"]},
        "inference": {"max_tokens": 16, "temperature": 0.1, "top_p": 0.95},
        "output": _LOCAL,
    },
    "inference_hf_chat": {
        "taskType": "inference",
        "resources": _machine("8", "16Gi", gpus=1),
        "model": {
            **_hub(TINY, revision="main"),
            "transformers": {"device_map": "cuda", "dtype": "float16", "trust_remote_code": False},
        },
        "data": {
            "type": "list",
            "items": _CHATS,
            "metadata": [{"row_id": "one", "topic": "cars"}, {"row_id": "two", "topic": "lamps"}],
        },
        "inference": {"max_new_tokens": 64, "temperature": 0.0, "do_sample": False, "no_repeat_ngram_size": 4},
        "postprocess": {
            "jsonl_export": {
                "path": "rows.jsonl",
                "fields": {
                    "row_id": "metadata.row_id",
                    "topic": "metadata.topic",
                    "question": "prompt",
                    "messages": {"from": "metadata", "key": "prompt"},
                    "answer": "output",
                },
                "required_fields": ["row_id", "answer"],
            }
        },
        "output": _LOCAL,
    },
    "inference_tf_llama": {
        "taskType": "inference",
        "enforce_cpu": True,
        "resources": _machine("8", "16Gi"),
        "model": {
            **_hub(LLAMA_1B, revision="main"),
            "transformers": {
                "device_map": "cpu",
                "dtype": "float32",
                "trust_remote_code": False,
                "low_cpu_mem_usage": True,
            },
        },
        "data": _QUESTIONS,
        "inference": {
            "max_new_tokens": 128,
            "temperature": 0.7,
            "top_p": 0.95,
            "top_k": 50,
            "do_sample": True,
            "repetition_penalty": 1.0,
        },
        "output": _LOCAL,
    },
    "inference_vllm_tiny": {
        "taskType": "inference",
        "resources": _machine("8", "32Gi", gpus=1, replicas=1),
        "model": {**_hub(TINY, revision="main"), "vllm": _VLLM},
        "data": _QUESTIONS,
        "inference": {"max_tokens": 128, "temperature": 0.7, "top_p": 0.95},
        "output": _LOCAL,
    },
    "inference_vllm_chat": {
        "taskType": "inference",
        "resources": _machine("8", "32Gi", gpus=1),
        "model": {**_hub(TINY, revision="main"), "vllm": {**_VLLM, "gpu_memory_utilization": 0.5}},
        "data": {"type": "list", "items": _CHATS},
        "inference": {"max_tokens": 64, "temperature": 0.0},
        "output": _LOCAL,
    },
    "inference_vllm_qwen3": {
        "taskType": "inference",
        "resources": _machine(8, "16Gi", gpus=1, vram="24Gi"),
        "model": {**_hub("Qwen/Qwen3-8B", revision="main"), "vllm": _VLLM},
        "data": {"type": "list", "items": ["Where is the car?", "Where is the lamp?"]},
        "inference": {"max_tokens": 16, "temperature": 0.0},
        "output": _LOCAL,
    },
    "inference_vllm_llama": _sharded(TINY),
    "inference_vllm_mistral": _sharded(MISTRAL),
    "inference_vllm_structured": {
        "taskType": "inference",
        "resources": _machine("8", "16Gi", gpus=1, vram="8Gi", replicas=1),
        "model": {**_hub("Qwen/Qwen2.5-1.5B-Instruct", revision="main"), "vllm": _VLLM},
        "data": {
            "type": "graph_template",
            "template": {
                "name": "format",
                "columns": [{"label": "symbol", "data": {"type": "list", "items": ["one", "two", "three"]}}],
                "options": {
                    "format": {
                        "steps": [
                            {
                                "label": "asked",
                                "template": "Choose a date for {ref0}.",
                                "arguments": [{"label": "ref0", "value": "symbol"}],
                            }
                        ],
                        "messages": [
                            {"role": "system", "content": "Answer with one JSON object."},
                            {"role": "user", "content": "asked"},
                        ],
                    }
                },
            },
        },
        "inference": {
            "max_tokens": 1024,
            "temperature": 0.0,
            "top_p": 1.0,
            "templates": {
                "type": "object",
                "properties": {
                    "start_date": {"type": "string", "description": "A date"},
                    "rationale": {"type": "string", "description": "Why", "maxLength": 200},
                    "alternative_dates": {
                        "type": "array",
                        "maxItems": 3,
                        "items": {
                            "type": "object",
                            "properties": {"date": {"type": "string"}, "regime": {"type": "string"}},
                            "required": ["date", "regime"],
                        },
                    },
                },
                "required": ["start_date", "rationale", "alternative_dates"],
            },
        },
        "output": _HTTP,
    },
    "inference_vllm_all_args": {
        "taskType": "inference",
        "model": {
            **_hub("Qwen/Qwen3-8B-AWQ"),
            "vllm": {
                "quantization": "awq",
                "kv_cache_dtype": "auto",
                "enforce_eager": True,
                "swap_space": 4,
                "cpu_offload_gb": 0,
                "max_model_len": 2048,
                "max_num_batched_tokens": 2048,
                "gpu_memory_utilization": 0.9,
                "dtype": "auto",
                "revision": "main",
                "tokenizer_revision": "main",
                "rope_scaling": {"type": "dynamic", "factor": 1.0},
                "rope_theta": 10000.0,
            },
        },
        "resources": _machine("4", "16Gi", gpus=1, vram="16Gi", replicas=1),
        "inference": {
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "max_tokens": 128,
            "min_tokens": 10,
            "seed": 42,
            "n": 2,
            "repetition_penalty": 1.15,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "stop": ["\n\n", "###"],
            "stop_token_ids": [],
            "bad_words": ["heck", "darn"],
            "skip_special_tokens": True,
            "logprobs": 3,
            "templates": [
                {"name": "rating", "type": "int", "min": 0, "max": 10},
                {"name": "sentiment", "type": "str", "candidates": ["positive", "negative", "neutral"]},
                {"name": "published_on", "type": "date", "min": "2024-01-01", "max": "2025-12-31"},
            ],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "data": {"type": "list", "items": ["Where is the red car?", "Where is the lamp?"]},
        "output": {"destination": {"type": "http", "timeoutSec": 120}, "artifacts": ["results.json"]},
    },
    "inference_vllm_http_callback": {
        "taskType": "inference",
        "resources": _machine("4", "16GiB", gpus=1),
        "model": {
            "source": {"identifier": "mistralai/Mistral-7B-Instruct-v0.3"},
            "vllm": {"tensor_parallel_size": 1, "max_model_len": 4096},
        },
        "data": {"type": "list", "items": ["Where is the car?", "Where is the lamp?"]},
        "inference": {"max_tokens": 256, "temperature": 0.6, "top_p": 0.9},
        "output": {
            "destination": {
                "type": "http",
                "url": "http://server:8000/api/v1/results",
                "method": "POST",
                "timeoutSec": 10,
                "headers": {"Authorization": "Bearer replace-me", "Content-Type": "application/json"},
            },
            "artifacts": ["results.json"],
        },
    },
    "multi_step_cot": {
        "taskType": "inference",
        "resources": _machine("8", "16Gi"),
        "data": _QUESTIONS,
        "inference": {"max_tokens": 128, "temperature": 0.7, "top_p": 0.95},
        "stages": [
            {"name": "draft-cot", "spec": _draft("Draft an answer.", 0.5)},
            {
                "name": "refine-gpu",
                "spec": {
                    "resources": _machine("8", "32Gi", gpus=1),
                    "model": {**_hub(MISTRAL, revision="main"), "vllm": _VLLM},
                    "inference": {"system_prompt": "Refine the draft.", "temperature": 0.6, "top_p": 0.95},
                    "output": _LOCAL,
                },
            },
            {"name": "format-json", "spec": _draft("Answer in JSON.", 0.2)},
        ],
    },
    "dag_inference_example": {
        "taskType": "inference",
        "resources": _machine("4", "16GiB"),
        "model": _hub(TINY),
        "graph": {
            "nodes": [
                {
                    "name": "branch-a",
                    "spec": {"taskType": "inference", "data": {"type": "list", "items": ["Name three benefits."]}},
                },
                {
                    "name": "branch-b",
                    "spec": {"taskType": "inference", "data": {"type": "list", "items": ["Name two challenges."]}},
                },
                {
                    "name": "synthesis",
                    "dependsOn": ["branch-a", "branch-b"],
                    "spec": {
                        "taskType": "inference",
                        "data": {
                            "type": "graph_template",
                            "template": {
                                "name": "two_column_briefing",
                                "columns": [
                                    {"label": "Benefits", "node": "branch-a", "path": "items[0].output"},
                                    {"label": "Challenges", "node": "branch-b", "path": "items[0].output"},
                                ],
                            },
                        },
                    },
                },
            ]
        },
        "output": _LOCAL,
    },
    "embedding_vllm_tiny": {
        "taskType": "embedding",
        "resources": _machine(4, "8Gi", gpus=1),
        "model": {
            **_hub("BAAI/bge-small-en-v1.5", revision="main"),
            "vllm": {"convert": "embed", "gpu_memory_utilization": 0.9},
        },
        "data": {"type": "list", "items": ["a red car", "a blue lamp", "a green house"]},
        "output": {
            "destination": {"type": "local"},
            "artifacts": ["results.json", "embeddings.safetensors", "logs"],
        },
    },
    "rag_query_qdrant": {
        "taskType": "rag",
        "resources": _machine("2", "4Gi"),
        "qdrant": {
            "url": "https://cluster.example:6333",
            "api_key": "${QDRANT_API_KEY}",
            "collection": "demo_collection",
        },
        "embedding": {"model": "sentence-transformers/all-MiniLM-L6-v2"},
        "search": {"top_k": 5},
        "data": {"type": "list", "items": ["Where is the car?", "Where is the lamp?"]},
        "output": _LOCAL,
    },
    "sft_llama_1b": {
        "taskType": "sft",
        "resources": _machine("8", "32Gi", gpus=1, replicas=1),
        "model": _hub(TINY),
        "data": _math("\n\nAnswer: ", "train[:5%]", 200),
        "training": _supervised(
            2,
            4,
            4,
            5.0e-5,
            512,
            allow_multi_gpu=False,
            logging_steps=5,
            save_steps=50,
            save_model=True,
            gradient_checkpointing=True,
            fp16=False,
            bf16=True,
        ),
        "output": _CHECKPOINTS,
    },
    "sft_llama_3b": {
        "taskType": "sft",
        "resources": _machine("8", "32GiB", gpus=2),
        "model": _hub(LLAMA_3B),
        "data": _math("\n\nAnswer: ", "train[:5%]", 200),
        "training": _supervised(
            2,
            2,
            4,
            5.0e-5,
            512,
            allow_multi_gpu=True,
            visible_devices="0,1",
            logging_steps=5,
            save_steps=50,
            save_strategy="steps",
            save_model=False,
            gradient_checkpointing=True,
            fp16=False,
            bf16=True,
            deepspeed={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 2, "overlap_comm": True},
                "bf16": {"enabled": True},
            },
        ),
        "output": {"destination": {"type": "local"}, "artifacts": ["results.json"]},
    },
    "sft_llama_1b_multi_gpu": {
        "taskType": "sft",
        "resources": _machine("8", "32Gi", gpus=2, vram="16Gi"),
        "model": _hub(TINY),
        "data": _math("\n\nAnswer: ", "train[:5%]", 64),
        "training": _supervised(
            1,
            2,
            4,
            5.0e-5,
            512,
            allow_multi_gpu=True,
            logging_steps=5,
            save_strategy="no",
            save_model=False,
            gradient_checkpointing=True,
            fp16=False,
            bf16=True,
        ),
        "output": _HTTP,
    },
    "sft_llama_two_stage": {
        "taskType": "sft",
        "resources": _machine("8", "32GiB", gpus=1, replicas=1),
        "model": _hub(LLAMA_1B),
        "output": _WITH_TOKEN,
        "stages": [
            {
                "name": "gsm8k-stage",
                "spec": {
                    "data": _math("\n\nAnswer: ", "train[:2%]", 120),
                    "training": _supervised(
                        1,
                        4,
                        2,
                        5.0e-5,
                        512,
                        logging_steps=10,
                        save_steps=50,
                        save_model=True,
                        gradient_checkpointing=False,
                    ),
                },
            },
            {
                "name": "humaneval-stage",
                "spec": {
                    "checkpoint": {"load": {"type": "http", "url": "${gsm8k-stage.final_model_archive}"}},
                    "data": _code(),
                    "training": _supervised(
                        1,
                        2,
                        4,
                        3.0e-5,
                        768,
                        logging_steps=10,
                        save_steps=100,
                        save_model=True,
                        gradient_checkpointing=False,
                    ),
                },
            },
        ],
    },
    "lora_sft_llama": {
        "taskType": "lora_sft",
        "sloSeconds": 10,
        "resources": _machine("8", "48Gi", gpus=1, replicas=1),
        "model": _hub(TINY),
        "lora": _LORA,
        "data": _math("\n\nAnswer: ", "train[:2%]", 200),
        "training": _supervised(
            1,
            2,
            4,
            2.0e-4,
            512,
            logging_steps=10,
            save_steps=100,
            save_model=True,
            gradient_checkpointing=False,
            fp16=False,
            bf16=True,
        ),
        "output": {
            "destination": {"type": "local"},
            "artifacts": ["results.json", "logs", "artifacts/lora_adapter"],
        },
    },
    "lora_sft_llama_two_stage": {
        "taskType": "lora_sft",
        "resources": _machine("8", "48GiB", gpus=1),
        "model": _hub(LLAMA_3B),
        "lora": _LORA,
        "output": {**_WITH_TOKEN, "artifacts": ["results.json", "final_lora"]},
        "stages": [
            {
                "name": "gsm8k-stage",
                "spec": {
                    "data": _math("\n\nAnswer: ", "train[:2%]", 120),
                    "training": _supervised(
                        1,
                        2,
                        4,
                        2.0e-4,
                        512,
                        logging_steps=10,
                        save_steps=50,
                        save_model=True,
                        gradient_checkpointing=False,
                    ),
                },
            },
            {
                "name": "humaneval-stage",
                "spec": {
                    "checkpoint": {"load": {"type": "http", "url": "${gsm8k-stage.final_lora_archive}"}},
                    "data": _code(),
                    "training": _supervised(
                        1,
                        2,
                        4,
                        1.5e-4,
                        768,
                        logging_steps=10,
                        save_steps=100,
                        save_model=True,
                        gradient_checkpointing=False,
                    ),
                },
            },
        ],
    },
    "lora_then_inference": {
        "taskType": "lora_sft",
        "resources": _machine("12", "46Gi", gpus=1, vram="46Gi"),
        "model": _hub(TINY, revision="main"),
        "stages": [
            {
                "name": "lora-train",
                "spec": {
                    "taskType": "lora_sft",
                    "lora": {name: value for name, value in _LORA.items() if name != "use_rslora"},
                    "data": _math("\n\nReference answer: ", "train[:1%]", 200),
                    "training": _supervised(
                        1,
                        2,
                        4,
                        2.0e-4,
                        512,
                        logging_steps=20,
                        save_steps=80,
                        save_model=True,
                        gradient_checkpointing=False,
                        fp16=False,
                        bf16=True,
                    ),
                    "output": {
                        "destination": {"type": "http"},
                        "artifacts": ["results.json", "final_lora", "logs"],
                    },
                },
            },
            {
                "name": "gsm8k-inference",
                "spec": {
                    "taskType": "inference",
                    "model": {"adapters": [{"type": "lora", "url": "${lora-train.final_lora_archive}"}]},
                    "data": {**_QUESTIONS, "split": "train[:200]", "seed": 11},
                    "inference": {
                        "system_prompt": "Use the adapter, and end with the answer.",
                        "max_tokens": 256,
                        "temperature": 0.2,
                        "top_p": 0.9,
                    },
                    "output": _LOCAL,
                },
            },
        ],
    },
    "dpo_training_llama_1b": _dpo(TINY, _machine("8", "32Gi", gpus=1), _CHECKPOINTS, batch_size=4, save_model=True),
    "dpo_training_ministral": _dpo(
        MINISTRAL, _machine("16", "64Gi", gpus=1), _CHECKPOINTS, batch_size=4, save_model=True
    ),
    "dpo_training_llama_1b_multi_gpu": _dpo(
        TINY,
        _machine("8", "32Gi", gpus=2, vram="24Gi", replicas=1),
        _HTTP,
        batch_size=2,
        save_model=False,
        allow_multi_gpu=True,
    ),
    "ppo_training_llama_1b": _ppo(
        TINY,
        _machine(16, "64Gi", gpus=1),
        batch_size=2,
        gradient_accumulation_steps=2,
        steps=50,
        ppo_epochs=4,
        early_stopping=True,
        save_strategy="steps",
        save_model=True,
        report_to=None,
        project="tinyllama-ppo-training",
    ),
    "ppo_training_ministral": _ppo(
        MINISTRAL,
        _machine("16", "64Gi", gpus=1, replicas=1),
        batch_size=2,
        gradient_accumulation_steps=2,
        steps=50,
        ppo_epochs=4,
        early_stopping=False,
        optimize_cuda_cache=True,
        save_strategy="steps",
        save_model=True,
        log_with=None,
        tracker_project_name="ministral-ppo-training",
    ),
    "ppo_training_llama_1b_multi_gpu": _ppo(
        TINY,
        _machine("16", "64Gi", gpus=2, vram="32Gi"),
        allow_multi_gpu=True,
        batch_size=1,
        gradient_accumulation_steps=1,
        steps=16,
        ppo_epochs=2,
        early_stopping=False,
        optimize_cuda_cache=True,
        save_strategy="no",
        save_model=False,
        log_with=None,
        tracker_project_name="tinyllama-ppo-multi-gpu",
    ),
}


#: Those that ask for what no other engine has.
NEED_VLLM: Final = frozenset({"inference_vllm_all_args"})


def template(name: str) -> dict[str, Any]:
    """Return the template of a file as it is read."""
    return {
        "apiVersion": "flowmesh/v1",
        "metadata": {"name": name.replace("_", "-")},
        "spec": copy.deepcopy(TEMPLATES[name]),
    }


@dataclass(frozen=True, kw_only=True)
class Stand:
    """What stands in for what a machine without GPU and network lacks: presets, and what lies on this machine."""

    chat: str
    embedding: str
    #: Folder of a classifier with the classes negative and positive.
    sentiment: str
    #: JSON lines with question, answer, prompt and canonical_solution.
    rows: str
    #: Address of a Qdrant, and of what takes results.
    qdrant: str
    receiver: str


def runnable(name: str, stand: Stand) -> dict[str, Any]:
    """Return a template with models, hub data sets and services swapped, and without what it asks of machines.

    The early stop of PPO, which is refused, is left out.
    """
    found = template(name)
    inner = [*found["spec"].get("stages", ()), *found["spec"].get("graph", {}).get("nodes", ())]
    for spec in [found["spec"], *(entry["spec"] for entry in inner)]:
        _swap(spec, stand)
    return found


def _swap(spec: dict[str, Any], stand: Stand) -> None:
    spec.get("resources", {}).pop("hardware", None)
    model = spec.get("model", {})
    if "source" in model:
        model["source"] = {"identifier": stand.embedding if spec.get("taskType") == "embedding" else stand.chat}
    if model.get("transformers", {}).get("device_map") == "cuda":
        model["transformers"]["device_map"] = "cpu"
    if "identifier" in spec.get("reward_model", {}):
        spec["reward_model"] = {"type": "sentiment", "path": stand.sentiment}
    if spec.get("training", {}).get("early_stopping"):
        del spec["training"]["early_stopping"]
    spec.get("training", {}).pop("deepspeed", None)
    data = spec.get("data", {})
    if data.get("type") == "dataset":
        kept = {key: value for key, value in data.items() if key in ("column", "shuffle", "seed")}
        spec["data"] = {"type": "jsonl", "path": stand.rows, **kept}
    elif "dataset_name" in data:
        columns = {"prompt_field": data["prompt_column"], "response_field": data["response_column"]}
        spec["data"] = {
            "jsonl": {"path": stand.rows, **columns, "separator": data["separator"]},
            "max_samples": data["max_samples"],
        }
    if "qdrant" in spec:
        spec["qdrant"] = {**spec["qdrant"], "url": stand.qdrant}
        spec["embedding"] = {"model": stand.embedding}
    destination = spec.get("output", {}).get("destination", {})
    if destination.get("url"):
        destination["url"] = stand.receiver
