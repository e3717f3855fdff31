"""`graphkiln tune STORE --share a=0.7,b=0.3`: several models on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphkiln.cli.console import print_json, say
from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    from graphkiln.tuning.application import Applied
    from graphkiln.tuning.candidate import Candidate
    from graphkiln.tuning.target import Target
    from graphkiln.tuning.together import Together
    from graphkiln.tuning.tuner import Progress, Tuning

_INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_COLUMNS = 80


def refuse_options(given: Mapping[str, object], target: Target) -> None:
    """Several models are tuned for the highest rate of all together, with golden samples, on servers of our own.

    Raises:
        InvalidInput: Another option is given.
    """
    unfit = [option for option, value in given.items() if value]
    unfit += ["--objective"] if target.objective.value != "throughput" else []
    if unfit:
        raise InvalidInput(f"{unfit[0]} is for a single model, --share for several", hint="leave one of them out")


def tune_models(store: str, share: str, plan: Callable[[str], Tuning], *, apply: bool, as_json: bool) -> int:
    """Tunes several models of a store together, and shows what was found.

    Args:
        store: Their folder.
        share: As written.
        plan: Path of a model -> what is to be found out.
        apply: Whether to write what was found.
        as_json: Whether to print JSON.

    Returns:
        The exit code.
    """
    from graphkiln.tuning.application import check_writable
    from graphkiln.tuning.progress import line_of
    from graphkiln.tuning.together import tune_together

    shares = parse_shares(share)
    check_store(store, shares)
    tunings = {name: plan(f"{store}/{name}") for name in shares}
    for tuning in tunings.values() if apply else ():
        check_writable(tuning.subject)
    for name, tuning in tunings.items():
        space = tuning.spanned.space
        say(f"{name}: {len(space.candidates)} candidates of {space.points} combinations (--dry-run shows them, of one)")
    budget_s = next(iter(tunings.values())).budget_s

    def report(name: str, progress: Progress) -> None:
        say(f"{name}: {line_of(progress, tunings[name].spanned.space.today, budget_s)}")

    found = tune_together(tunings, shares, budget_s, report)
    show_together(found, tunings, shares, as_json=as_json)
    if apply and found.rate is not None:
        apply_choices({name: each.candidate for name, each in found.plan.responses.items()}, tunings)
    elif apply:
        say("nothing is written: no rate held for all models together")
    return 0 if found.rate is not None else 1


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the block, which gives back what it has; then the command says how to go on."""
    from graphkiln_backend.server.signals import Stopped, stopping_in_order

    try:
        with stopping_in_order():
            yield
    except KeyboardInterrupt as stopped:
        say("interrupted; the same command goes on from here")
        raise typer.Exit(stopped.exit_code if isinstance(stopped, Stopped) else _INTERRUPTED) from None


def parse_shares(text: str) -> dict[str, float]:
    """Reads `a=0.7,b=0.3`; any numbers above 0 will do, as only their ratios count.

    Raises:
        InvalidInput: A share is no number above 0, a model is named twice, or there is one model only.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        if not name or not 0 < share < float("inf") or name in shares:
            raise InvalidInput(f"--share {text}: expected MODEL=SHARE,MODEL=SHARE", hint="such as --share a=0.7,b=0.3")
        shares[name] = share
    if len(shares) < 2:
        raise InvalidInput(f"--share {text}: a single model", hint="graphkiln tune STORE/NAME tunes one")
    return shares


def check_store(store: str, names: Mapping[str, float]) -> None:
    """Refuses models that a store does not have.

    Raises:
        InvalidInput: The store is no folder, or lacks one.
    """
    missing = [name for name in names if Path(name).name != name or not (Path(store) / name).is_dir()]
    if missing:
        raise InvalidInput(
            f"--share: {store} has no model {', '.join(missing)}", hint="graphkiln tune STORE --share MODEL=SHARE,..."
        )


def show_together(
    found: Together, tunings: Mapping[str, Tuning], shares: Mapping[str, float], *, as_json: bool
) -> None:
    """Prints what was found, as a table of 80 columns or as JSON."""
    document = document_of_together(found, tunings, shares)
    if as_json:
        print_json(document)
    else:
        _print(document)


def document_of_together(found: Together, tunings: Mapping[str, Tuning], shares: Mapping[str, float]) -> dict[str, Any]:
    """What was found as JSON data."""
    from graphkiln.tuning.document import in_words
    from graphkiln.tuning.trials import Measured

    whole = sum(shares.values())
    models = {}
    for name, response in found.plan.responses.items():
        outcome = found.measured.get(name)
        measured = outcome if isinstance(outcome, Measured) else None
        bound_s = measured.latency.p99_at_most_s if measured else float("inf")
        models[name] = {
            "share": shares[name] / whole,
            "configuration": response.candidate.as_json(),
            "changes": in_words(response.candidate, tunings[name].spanned.space.today),
            "cores": response.cores,
            "rate_alone": response.rate,
            "rate": None if found.rate is None else found.rate * shares[name] / whole,
            "p99_at_most_ms": bound_s * 1e3 if bound_s < float("inf") else None,
            "requests": measured.requests if measured else 0,
        }
    plan = found.plan
    return {
        "met": found.rate is not None,
        "rate": found.rate,
        "rate_by_models_alone": plan.rate,
        "limited_by": plan.limited_by,
        "cores": plan.cores,
        "memory_mb": plan.memory_bytes / (1 << 20),
        "reason": found.reason,
        "models": models,
        "spent_s": found.spent_s,
    }


def _print(document: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.width = min(console.width, _COLUMNS)
    table = Table("model", "share", "cores", "configuration", "per s", "p99 ms, at most", collapse_padding=True)
    for name, row in sorted(document["models"].items()):
        rate, bound = row["rate"], row["p99_at_most_ms"]
        table.add_row(
            escape(name),
            f"{row['share']:.0%}",
            f"{row['cores']:g}",
            escape(row["changes"]),
            "-" if rate is None else f"{rate:.4g}",
            "-" if bound is None else f"{bound:.3g}",
        )
    for line in _lines(document):
        console.print(line, markup=False, highlight=False)
    console.print(table)
    console.print(f"{document['spent_s'] / 60:.1f} minutes", markup=False, highlight=False)


def _lines(document: Mapping[str, Any]) -> list[str]:
    alone = f"{document['rate_by_models_alone']:.4g}"
    if document["rate"] is None:
        return [
            f"no rate held for all models together: {document['reason']}",
            f"by each model alone: {alone} per second",
        ]
    return [
        f"together: {document['rate']:.4g} requests per second, measured in one server ({alone} by each model alone)",
        f"limited by {document['limited_by']}; {document['cores']:g} cores, {document['memory_mb']:.0f} MiB",
    ]


def apply_choice(candidate: Candidate | None, tuning: Tuning) -> None:
    """Writes what was chosen into the configuration of its model, proven once more, and says how to go back.

    Args:
        candidate: The choice; None where nothing met the target.
        tuning: What was asked.

    Raises:
        VerificationError: The session cannot be built any more, or answers otherwise.
        RepositoryError: The file cannot be written.
    """
    name = tuning.subject.name
    if candidate is None:
        say(f"nothing is written: nothing was proven to meet the target of '{name}'")
        return
    apply_choices({name: candidate}, {name: tuning})


def apply_choices(chosen: Mapping[str, Candidate], tunings: Mapping[str, Tuning]) -> None:
    """The same for several models: nothing is written before all of them are proven.

    Args:
        chosen: Model -> its choice.
        tunings: Model -> what was asked.

    Raises:
        VerificationError: A session cannot be built any more, or answers otherwise.
        RepositoryError: A file cannot be written.
    """
    from graphkiln.tuning import application

    changing = {name: each for name, each in chosen.items() if each != tunings[name].spanned.space.today}
    for name in (name for name in chosen if name not in changing):
        say(f"nothing is written: what serves '{name}' today is the best")
    for name, candidate in changing.items():
        application.prove(candidate, tunings[name].subject, tunings[name].questions)
    for name, candidate in changing.items():
        _tell(application.write(candidate, tunings[name].subject, tunings[name].reach))


def _tell(applied: Applied) -> None:
    written = [str(path) for path in (applied.config, applied.version) if path]
    for line in (f"wrote {' and '.join(written)}", *applied.notes, *_ways(applied)):
        say(line)


def _ways(applied: Applied) -> Iterator[str]:
    yield "a server in poll mode takes it by itself, another one that serves this folder when it is started again;"
    yield f"one in explicit mode with: {applied.load_command}"
    yield "these two commands go back (the second one for explicit mode):"
    yield from (f"  {command}" for command in applied.commands_back)
