"""Graph templates: what each makes of its columns, what is refused before they have values, and what would grow."""

from __future__ import annotations

import pytest

from gpuflow.spec import formatting
from gpuflow.spec.checking import check_spec
from gpuflow.spec.formatting import MAX_TEXT, Pattern, TextBudget
from gpuflow.spec.graph_template import check_template, render
from gpuflow.spec.report import MAX_FOUND, Findings


def column(label, value):
    return {"label": label, "value": value}


def formatted(columns, messages, steps=()):
    return {"name": "format", "columns": columns, "options": {"format": {"steps": list(steps), "messages": messages}}}


def wrong(template):
    return {".".join(map(str, path)): message for path, message in check_template(template)}


ROWS = [column("Day", ["Monday", "Tuesday"]), column("City", "Paris")]


def test_a_format_makes_a_chat_of_each_row():
    steps = [
        {
            "label": "plan",
            "template": "Plan {d} in {c}.",
            "arguments": [{"label": "d", "value": "Day"}, {"label": "c", "value": "City"}],
        }
    ]
    messages = [
        {"role": "system", "content": "Be brief about {City}, {{so}} and {unknown}."},
        {"role": "user", "content": "plan"},
    ]
    template = formatted(ROWS, messages, steps)

    assert wrong(template) == {}
    assert render(template) == [
        [
            {"role": "system", "content": "Be brief about Paris, {so} and {unknown}."},
            {"role": "user", "content": f"Plan {day} in Paris."},
        ]
        for day in ("Monday", "Tuesday")
    ]


def test_items_stand_by_their_outputs_and_a_message_may_be_a_chat():
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    columns = [column("Said", [{"index": 0, "output": "red"}]), column("Before", [chat])]
    assert render(formatted(columns, [{"content": "Before"}, {"role": "user", "content": "Is it {Said}?"}])) == [
        [*chat, {"role": "user", "content": "Is it red?"}]
    ]


def test_a_format_needs_no_columns():
    assert render(formatted([], [{"role": "user", "content": "Hello"}])) == [[{"role": "user", "content": "Hello"}]]


def test_a_briefing_has_a_role_a_line_a_column_and_what_to_make_of_them():
    columns = [column("Pros", "fast\nclean"), column("Cons", "loud")]
    (text,) = render({"name": "two_column_briefing", "columns": columns, "options": {"role": "auditor"}})
    first, *points, last = text.splitlines()
    assert "an auditor" in first
    assert points == ["• Pros: fast", "  clean", "• Cons: loud"]
    assert "pros against cons" in last
    (own,) = render(
        {"name": "two_column_briefing", "columns": columns, "options": {"intro": ["Read:", "-"], "closing": "Done."}}
    )
    assert own == "Read:\n-\n• Pros: fast\n  clean\n• Cons: loud\nDone."


def test_a_text_names_its_columns_by_number():
    assert render({"name": "text", "text": "{col0_label}={col0_value} {col1_value} {x}", "columns": ROWS[::-1]}) == [
        'City=Paris ["Monday", "Tuesday"] {x}'
    ]


@pytest.mark.parametrize(
    ("template", "path", "words"),
    [
        ({"name": "brief", "columns": ROWS}, "name", "is no template; it must be columns"),
        ({"columns": []}, "columns", "at least 1"),
        ({"name": "two_column_briefing", "columns": ROWS[:1]}, "columns", "at least 2"),
        ({"columns": [ROWS[0], ROWS[0]]}, "columns.1.label", "rename one"),
        ({"columns": [{"label": "a", "data": {"type": "dataset", "url": "x"}}]}, "columns.0.data", "{type: list"),
        ({"columns": ROWS, "options": {"outro": "x"}}, "options.outro", "closing or intro"),
        ({"columns": ROWS, "text": "x"}, "text", "`text`"),
        ({"name": "format", "columns": ROWS}, "options.format", "with messages"),
        (formatted(ROWS, []), "options.format.messages", "1 to 100"),
        (formatted(ROWS, [{"role": "robot", "content": "x"}]), "options.format.messages.0.role", "it must be system"),
        (formatted(ROWS, [{"content": "x"}]), "options.format.messages.0", "has no role"),
        (formatted(ROWS, [{"role": "user"}]), "options.format.messages.0", "content that is text"),
        (
            formatted(ROWS, [{"role": "user", "content": "x"}], [{"label": "s", "function": "lambda a: a"}]),
            "options.format.steps.0.function",
            "is not run",
        ),
        (
            formatted(ROWS, [{"role": "user", "content": "x"}], [{"label": "s", "template": "{a}"}]),
            "options.format.steps.0.template",
            "{a}",
        ),
        (
            formatted(
                ROWS,
                [{"role": "user", "content": "x"}],
                [{"label": "s", "template": "{a}", "arguments": [{"label": "a", "value": "Nope"}]}],
            ),
            "options.format.steps.0.arguments.0.value",
            "are Day, City",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_has_run(template, path, words):
    assert words in wrong(template)[path]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"columns": [column("a", [1]), column("b", [1, 2])]}, "equally long"),
        (formatted([column("a", [1, 2, 3]), column("b", [1, 2])], [{"role": "user", "content": "a"}]), "equally long"),
        (formatted([column("a", [])], [{"role": "user", "content": "a"}]), "no entries"),
        (formatted([column("a", "x")], [{"content": "a"}]), "is no chat"),
        ({"columns": [column("a", None)]}, "has no value"),
        ({"columns": [column("a", "x" * (MAX_TEXT + 1))]}, "a prompt has at most"),
    ],
)
def test_values_that_do_not_fit_are_named(template, words):
    with pytest.raises(ValueError, match=words):
        render(template)


def test_steps_that_double_a_text_end_early():
    steps = [
        {"label": f"s{n}", "template": "{a}{a}", "arguments": [{"label": "a", "value": f"s{n - 1}" if n else "x"}]}
        for n in range(100)
    ]
    with pytest.raises(ValueError, match="characters"):
        render(formatted([column("x", "ten chars.")], [{"role": "user", "content": "s99"}], steps))


@pytest.mark.parametrize("text", ["{0}", "{a.__class__}", "{a!r}", "{a[0]}", "{a:>10000000000}", "{", "}"])
def test_no_part_of_a_value_can_be_named(text):
    assert Pattern(text).fill({"a": "value"}, TextBudget(), strict=True) == text


def test_columns_that_no_text_names_cost_nothing_and_many_texts_end_early():
    long = column("long", "x" * (MAX_TEXT // 2))
    many = column("many", ["row"] * 1000)
    assert len(render(formatted([long, many], [{"role": "user", "content": "Say {many}"}]))) == 1000
    with pytest.raises(ValueError, match="characters or"):
        render(formatted([long, many], [{"role": "user", "content": "Say {long}"}]))
    with pytest.raises(ValueError, match="characters or"):
        render({"columns": [long, many]})


class Watched(dict):
    """An item of a column that counts how often it was made text."""

    def __init__(self, output):
        super().__init__(output=output)
        self.made = 0

    def __getitem__(self, key):
        self.made += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("name", ["columns", "two_column_briefing", "text"])
def test_columns_that_name_one_long_value_end_with_the_first_that_does_not_fit(name):
    value = Watched("x" * (MAX_TEXT // 4))
    template = {"name": name, "columns": [column(f"c{n}", value) for n in range(1000)]}
    if name == "text":
        template["text"] = "".join(f"{{col{n}_value}}" for n in range(1000))
    with pytest.raises(ValueError, match="characters of a prompt"):
        render(template)
    assert value.made <= 5


def test_a_text_makes_only_the_columns_that_it_names():
    unnamed = Watched("x")
    columns = [column("a", "A"), column("b", unnamed), column("c", "y" * (MAX_TEXT + 1))]
    assert render({"name": "text", "text": "{col0_value}{col0_value}", "columns": columns}) == ["AA"]
    assert unnamed.made == 0


def test_texts_that_are_read_again_and_again_for_nothing_end_early(monkeypatch):
    monkeypatch.setattr(formatting, "MAX_TEXTS", 1_000_000)
    content = "{x}" * 50_000
    empty = column("x", [""] * 10)
    step = {"label": "s", "template": content, "arguments": [{"label": "x", "value": "x"}]}
    with pytest.raises(ValueError, match="reads more"):
        render(formatted([empty], [{"role": "user", "content": content}]))
    with pytest.raises(ValueError, match="reads more"):
        render(formatted([empty], [{"role": "user", "content": "s"}], [step]))


def test_a_text_is_parsed_once_and_not_for_each_row(monkeypatch):
    parsed = []

    class Part:
        def finditer(self, text):
            parsed.append(text)
            return real.finditer(text)

    real = formatting._PART
    monkeypatch.setattr(formatting, "_PART", Part())
    step = {"label": "s", "template": "a {x}", "arguments": [{"label": "x", "value": "x"}]}
    render(formatted([column("x", ["1"] * 50)], [{"role": "user", "content": "b {s}"}], [step]))
    assert sorted(parsed) == ["a {x}", "b {s}"]


def test_messages_about_a_step_are_few_and_short():
    labels = [column(f"{n}{'l' * 200}", "v") for n in range(1000)]
    arguments = [{"label": f"a{n}", "value": "nope"} for n in range(100)]
    step = {"label": "s", "template": "{b}" * 10_000 + "{c}", "arguments": arguments}
    found = list(check_template(formatted(labels, [{"role": "user", "content": "s"}], [step])))
    assert [message.split(",")[0] for path, message in found if path[-1] == "template"] == ["has {b}", "has {c}"]
    assert len(found) == 102
    assert all(len(message) < 1000 and "more" in message for _, message in found)

    many = {**step, "arguments": [*arguments, arguments[0]]}
    (path, message), *others = check_template(formatted(labels, [{"role": "user", "content": "s"}], [many]))
    assert path[-1] == "arguments"
    assert "at most 100" in message
    assert others == []


def checked(findings, *, at_dispatch, **template):
    data = {"type": "graph_template", "template": {"columns": [column("a", "b")], **template}}
    spec = {"taskType": "inference", "model": {"source": {"identifier": "m"}}, "data": data}
    check_spec(spec, findings, foreign=False, at_dispatch=at_dispatch)
    return [mistake.path for mistake in findings.mistakes]


def test_nothing_is_looked_for_once_enough_was_found(monkeypatch):
    asked = []

    def endless(template):
        while True:
            asked.append(template)
            assert len(asked) <= MAX_FOUND
            yield ("columns", len(asked)), "is wrong"

    monkeypatch.setattr("gpuflow.spec.checking.check_template", endless)
    assert len(checked(Findings(), at_dispatch=True)) == MAX_FOUND


def test_a_wrong_template_of_a_stage_is_told_by_its_path_and_not_rendered():
    findings = Findings(locate=lambda path: ("spec", "stages", 0, "spec", *path))
    assert checked(findings, at_dispatch=True, name="format", options={"format": "x"}) == [
        "spec.stages[0].spec.data.template.options.format"
    ]


def test_a_wrong_template_is_not_rendered_where_no_more_mistakes_are_noted():
    findings = Findings()
    for number in range(MAX_FOUND):
        findings.warn(("data", number), "is not used")
    assert checked(findings, at_dispatch=True, name="format", options={"format": "x"}) == []
