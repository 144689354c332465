"""What scores the answers in grpo and ppo: a reward model, a sentiment classifier, or a function by its name.

No template holds code: a function is one of `FUNCTIONS`, or of the entry points `gpuflow.reward_functions` of a package
that is installed beside the worker. It is called as `function(prompts, completions, **columns)` with texts, where
`columns` are the other columns of the data, and returns a number for each completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from executors.base import bad_input
from gpuflow.protocol import Emitter, Request

#: Entry points of packages that bring reward functions.
GROUP: Final = "gpuflow.reward_functions"
#: A classifier of sentiment in English, where the task names none.
DEFAULT_SENTIMENT: Final = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
_POSITIVE: Final = ("positive", "pos", "label_1")
_NEGATIVE: Final = ("negative", "neg", "label_0")

RewardFunction = Callable[..., Sequence[float]]


def exact_match(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for a completion that is the answer of its row, else 0."""
    return [float(one.strip() == right.strip()) for one, right in zip(completions, answer, strict=True)]


def contains_answer(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for a completion that has the answer of its row in it, else 0."""
    return [float(right.strip().lower() in one.lower()) for one, right in zip(completions, answer, strict=True)]


def brevity(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for an empty completion, and less the more characters there are: 0.5 at 100."""
    return [100 / (100 + len(one)) for one in completions]


def distinct_words(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of different words in a completion; 0 for none."""
    return [len(set(words)) / len(words) if (words := one.lower().split()) else 0.0 for one in completions]


FUNCTIONS: Final[Mapping[str, RewardFunction]] = {
    function.__name__: function for function in (exact_match, contains_answer, brevity, distinct_words)
}
_NEED_ANSWERS: Final = frozenset({"exact_match", "contains_answer"})


def _section(request: Request) -> Mapping[str, Any]:
    section: Mapping[str, Any] = request.spec.get("reward_model") or {}
    return section


def _kind(request: Request) -> str:
    section = _section(request)
    return section.get("type") or ("function" if section.get("identifier") in FUNCTIONS else "model")


def check_reward(request: Request) -> None:
    """Raise ExecutorError: BadInput for a task without a reward, or with a function that nobody has registered."""
    section = _section(request)
    if not section:
        raise bad_input(
            f"{request.task_type} needs a reward: reward_model: {{type: model, url: ...}}, {{type: sentiment}}, "
            f"or {{type: function, identifier: {', '.join(FUNCTIONS)}}}"
        )
    if _kind(request) == "function":
        _function(str(section.get("identifier")))


def check_reward_rows(request: Request, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ExecutorError: BadInput where the rows lack the column `answer` that a function reads."""
    name = _section(request).get("identifier")
    if _kind(request) == "function" and name in _NEED_ANSWERS and rows and "answer" not in rows[0]:
        raise bad_input(
            f"reward_model: {name} reads the column answer, which the data lacks or has not in every row as text; its "
            f"columns are: {', '.join(rows[0])}"
            + ("; ppo hands on no other columns, grpo does" if request.task_type == "ppo" else "")
        )


def _function(name: str) -> RewardFunction:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    registered = entry_points(group=GROUP)
    for entry in registered:
        if entry.name == name:
            function: RewardFunction = entry.load()
            return function
    known = ", ".join([*FUNCTIONS, *sorted(entry.name for entry in registered)])
    raise bad_input(
        f"reward_model: there is no reward function {name!r}; there are: {known}. A package that is installed beside "
        f"the worker adds one by an entry point in {GROUP}"
    )


def load_reward(request: Request, emitter: Emitter) -> tuple[Any, Any]:
    """Return the reward as TRL's GRPOTrainer takes it, and the tokenizer of a reward model (None for a function)."""
    kind = _kind(request)
    if kind == "function":
        name = str(_section(request)["identifier"])
        return _on_texts(_function(name), name), None
    emitter.status("loading", "loading the reward model")
    model, tokenizer, name = load_scorer(request, emitter)
    if kind == "model":
        return model, tokenizer
    is_margin = _section(request).get("score") == "margin"
    return _on_texts(_sentiment(model, tokenizer, name, is_margin=is_margin), "sentiment"), None


def load_scorer(request: Request, emitter: Emitter) -> tuple[Any, Any, str]:
    """Return the classifier of `reward_model`, its tokenizer and its name. Raises ExecutorError: BadInput."""
    from transformers import AutoModelForSequenceClassification

    from executors.modeling.loading import load_model, load_tokenizer
    from executors.modeling.location import adapter_folder, local, resolve, weights_folder

    section = _section(request)
    if section.get("path") and adapter_folder(section["path"]):
        raise bad_input("reward_model.path is an adapter; train the reward with training.merge_adapter: true")
    if section.get("path"):
        location = local(weights_folder(section["path"]), name=section["path"])
    else:
        names = {key: section[key] for key in ("revision", "trust_remote_code") if section.get(key)}
        source = {"identifier": section.get("identifier") or DEFAULT_SENTIMENT, **names}
        location = resolve({"source": source}, request.cache_dir, emitter)
    _check_head(location)
    options = {"num_labels": 1} if _kind(request) == "model" else {}
    model = load_model(location, {"dtype": "float32", **options}, AutoModelForSequenceClassification).eval()
    tokenizer = load_tokenizer(location, padding_side="right")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer, location.name


def _check_head(location: Any) -> None:
    """Raise ExecutorError: BadInput for a model that scores nothing: it would be given a head of random weights."""
    from transformers import AutoConfig

    kinds = AutoConfig.from_pretrained(location.place, **location.options).architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise bad_input(
            f"reward_model: {location.name} has no head that scores ({', '.join(kinds) or 'none is named'}); name a "
            "reward model, such as final_model of a task of type reward"
        )


def _sentiment(model: Any, tokenizer: Any, name: str, *, is_margin: bool = False) -> RewardFunction:
    """Return a function that gives the probability of the positive class for each completion.

    With `is_margin` it is the logit of that class less the one of the negative class.
    """
    import torch

    labels = {index: str(label).lower() for index, label in model.config.id2label.items()}
    positive = next((index for index, label in labels.items() if label in _POSITIVE), None)
    negative = next((index for index, label in labels.items() if label in _NEGATIVE), None)
    if is_margin and negative is None:
        raise bad_input(
            f"reward_model: {name} has no negative class ({', '.join(labels.values())}); leave score: margin out"
        )
    if positive is None:
        raise bad_input(
            f"reward_model: {name} has no positive class ({', '.join(labels.values())}); name a sentiment classifier"
        )

    def score(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        batch = tokenizer(list(completions), return_tensors="pt", padding=True, truncation=True, max_length=512)
        with torch.inference_mode():
            logits = model(**{key: value.to(model.device) for key, value in batch.items() if key != "token_type_ids"})
        found = logits.logits.float()
        rated = found[:, positive] - found[:, negative] if is_margin else found.softmax(-1)[:, positive]
        scores: list[float] = rated.tolist()
        return scores

    return score


#: What TRL passes beside the columns of the data.
_OF_TRL: Final = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"})


def _on_texts(function: RewardFunction, name: str) -> RewardFunction:
    """Return a function of TRL's form, which may get chats, for one on texts."""

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> list[float]:
        columns = {key: value for key, value in given.items() if key not in _OF_TRL}
        return [float(one) for one in function(_texts(prompts), _texts(completions), **columns)]

    reward.__name__ = name
    return reward


def _texts(values: Sequence[Any]) -> list[str]:
    return [
        value if isinstance(value, str) else "\n".join(str(one.get("content")) for one in value) for value in values
    ]
