"""The renderer of a policy directory, proven before anything is rendered.

`auto`: a directory without a chat template is ChatML's (the tiny policy, SmolLM2's vocabulary); a family that the package
`renderers` knows is that package's; any other is its own chat template's. What proves fit by none is refused by name.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pipeline.capture.messages import Message, ToolCall
from pipeline.capture.renderers import chatml
from pipeline.capture.renderers.base import Renderer, TemplateError
from pipeline.capture.renderers.forms import Hermes, ReasoningForm, ToolForm
from pipeline.capture.renderers.probe import misread, probe
from pipeline.capture.renderers.qwen_coder import QwenCoder
from pipeline.capture.renderers.suffix import Source, SuffixRenderer
from pipeline.capture.tokenizer import PolicyTokenizer

AUTO, NONE = "auto", "none"
KINDS = (AUTO, "chatml", "template", "renderers")
TOOL_FORMS: dict[str, type[ToolForm]] = {"hermes": Hermes, "qwen3-coder": QwenCoder}
REASONING_FORMS: dict[str, type[ReasoningForm]] = {"think": ReasoningForm}

_Form = TypeVar("_Form", ToolForm, ReasoningForm)


def load_renderer(
    policy_dir: str | Path, choice: str = AUTO, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> Renderer:
    """choice: `auto`, `chatml`, `template`, `renderers` (the family by the policy's name) or `renderers:FAMILY`.

    tool_parser: `auto` (the first of TOOL_FORMS that reads what the template writes, else the package's reader of whole
    turns where the family is the package's), one of them, or `module:Class` of a `ToolForm`. reasoning_parser: `auto` (`think` where the vocabulary or the template has its marks), `none`, `think`, or
    `module:Class` of a `ReasoningForm`.

    Raises TemplateError, which names the family, the promise that it breaks and the remedy; FileNotFoundError for a
    directory without a tokenizer; ValueError for a choice that is none.
    """
    kind, _, family = choice.partition(":")
    if kind not in KINDS or (family and kind != "renderers"):
        raise ValueError(
            f"engine.renderer is {choice!r}: it is auto, chatml, template, renderers or renderers:FAMILY"
        )
    folder = Path(policy_dir)
    calls = None if tool_parser == AUTO else _named(tool_parser, TOOL_FORMS, "engine.tool_parser")
    if kind == "chatml" or (kind == AUTO and not _has_template(folder)):
        return _chatml(folder, calls, reasoning_parser)
    refused: list[TemplateError] = []
    for source in _sources(folder, kind, family, refused):
        try:
            return _fitting(source, calls, reasoning_parser)
        except TemplateError as error:
            refused.append(error)
    raise TemplateError(
        "\n".join(map(str, refused))
        + f"\nThe policy in {folder} is refused. Remedy: another engine.renderer (this was "
        f"{choice}), the parsers that fit its template (engine.tool_parser, engine.reasoning_parser), or a "
        "chat_template.jinja in that directory that never rewrites what it wrote"
    )


def _chatml(folder: Path, calls: ToolForm | None, reasoning: str) -> Renderer:
    tokenizer = PolicyTokenizer.load(folder, chatml.MARKS.__contains__)
    form = (
        None if reasoning in (AUTO, NONE) else _named(reasoning, REASONING_FORMS, "engine.reasoning_parser")
    )
    return chatml.ChatMLRenderer(tokenizer, calls, form, thinks=reasoning != NONE)


def _sources(folder: Path, kind: str, family: str, refused: list[TemplateError]) -> Iterator[Source]:
    """What may fit, the likeliest first; what cannot even be tried goes to `refused`."""
    # Late: the tiny policy needs neither jinja2 nor `renderers`.
    from pipeline.capture.renderers import family as families
    from pipeline.capture.renderers.jinja import CannotRender, ChatTemplate
    from pipeline.capture.renderers.template import TemplateSource

    try:
        template = ChatTemplate.load(folder)
    except CannotRender as error:
        raise TemplateError(f"{folder.name}: {error}") from error
    source = "" if template is None else template.source

    def mark(text: str) -> bool:
        """What the template writes as a token is one by its hand only."""
        return text in chatml.MARKS or bool(text.strip() and text in source)

    if kind != "template":
        named = [family] if family else families.known(folder)
        # Which of several it is, only the directory's own template tells.
        if template is None and len(named) > 1:
            refused.append(
                TemplateError(f"{folder.name} may be {' or '.join(named)}: name it, as renderers:FAMILY")
            )
            named = []
        elif kind == "renderers" and not named:
            missing = (
                "knows no family by that name" if families.available() else "is not installed with httpx"
            )
            refused.append(
                TemplateError(
                    f"{folder.name}: the package `renderers` {missing}; a family is named as renderers:FAMILY"
                )
            )
        for name in named:
            try:
                yield families.FamilySource.load(folder, name, mark, template)
            except TemplateError as error:
                refused.append(error)
    if kind != "renderers":
        if template is None:
            refused.append(TemplateError(f"{folder.name}: the policy's directory has no chat template"))
            return
        try:
            yield TemplateSource(folder.name, PolicyTokenizer.load(folder, mark), template, _stops(folder))
        except TemplateError as error:
            refused.append(error)


def _fitting(source: Source, calls: ToolForm | None, reasoning: str) -> Renderer:
    """The renderer with the first form of call that reads what the template writes."""
    thinks = _reasoning(source, reasoning)
    forms = [calls] if calls else [form() for form in TOOL_FORMS.values()] if source.tools else [None]
    made = [SuffixRenderer(source, form, thinks, _blank(source, form)) for form in forms]
    if calls is None and (reader := source.reader()) is not None:
        made.append(SuffixRenderer(source, None, thinks, reader=reader))
    fitting = next((renderer for renderer in made if _reads(renderer)), made[0])
    probe(fitting)
    return fitting


def _reads(renderer: SuffixRenderer) -> bool:
    try:
        return misread(renderer) is None
    except ValueError:
        return False


def _blank(source: Source, form: ToolForm | None) -> str:
    """The white space that the template writes after a call's mark."""
    if form is None:
        return ""
    try:
        turn = source.turn((Message("assistant", "", (ToolCall("call00001", "look", "{}"),)),), True)
    except ValueError:
        return ""
    after = source.tokenizer.decode(turn, keep_special=True).partition(form.open)[2]
    return after[: len(after) - len(after.lstrip())]


def _reasoning(source: Source, choice: str) -> ReasoningForm | None:
    if choice == NONE:
        return None
    if choice != AUTO:
        return _named(choice, REASONING_FORMS, "engine.reasoning_parser")
    form = ReasoningForm()
    return form if source.tokenizer.special(form.open) is not None else None


def _named(choice: str, known: Mapping[str, Callable[[], _Form]], field: str) -> _Form:
    if choice in known:
        return known[choice]()
    module, _, name = choice.partition(":")
    if not name:
        raise ValueError(f"{field} is {choice!r}: it is auto, {', '.join(known)} or module:Class")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field} is {choice!r}, which cannot be loaded: {error}") from error


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_bytes()).get("chat_template"))


def _stops(folder: Path) -> list[int]:
    """What the model's makers let end a generation."""
    path = folder / "generation_config.json"
    found: int | list[int] | None = (
        json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    )
    return [] if found is None else [found] if isinstance(found, int) else found
