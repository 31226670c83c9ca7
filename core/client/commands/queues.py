"""queues: what is declared, held and waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gangline.core.client.options import client_of, output_options
from gangline.core.client.output import Column, Output, cell, gpu_time
from gangline.core.model.units import format_duration, format_size

Row = Mapping[str, Any]


def _name(row: Row) -> str:
    """Return the last name of the path, moved in under its parent."""
    return "  " * str(row["id"]).count("/") + cell(str(row["id"]).rpartition("/")[2]) if row.get("parent") else cell(row["id"])


def number(value: float | None) -> str:
    """Return a number without a fraction that is none; what is not given is unlimited."""
    return "-" if value is None else f"{value:.12g}"


def _state(row: Row) -> str:
    if row["state"] != "open":
        return cell(row["state"])
    return "open" if row.get("accepts", True) and row.get("starts", True) else "open, but not above"


def _of(field: str, resource: str) -> Column:
    heading = {"gpus": "GPUS", "cpus": "CPUS"}[resource]
    return (f"{field.upper()} {heading}", lambda row: number((row.get(field) or {}).get(resource)))


def _memory(field: str) -> Column:
    def shown(row: Row) -> str:
        mib = (row.get(field) or {}).get("memory_mib")
        return "-" if mib is None else format_size(mib)

    return (f"{field.upper()} MEMORY", shown)


def _part(value: float | None) -> str:
    """Return a part of a whole as a percentage."""
    return "-" if value is None else f"{value * 100:.1f}%"


def _usage(row: Row) -> str:
    return _part((row.get("usage") or {}).get("gpus"))


def _models(row: Row) -> str:
    """Return by GPU model what is held, and what there is to say of it."""
    words = (("allocated", ""), ("quota", "quota "), ("limit", "limit "), ("fair_share", "share "))
    by_model: dict[str, list[str]] = {}
    for field, word in words:
        for model, value in ((row.get(field) or {}).get("models") or {}).items():
            by_model.setdefault(cell(model), []).append(f"{word}{number(value)}")
    return "; ".join(f"{model} {', '.join(parts)}" for model, parts in by_model.items()) or "-"


def _users(row: Row) -> str:
    """Return who holds and waits for what, where users take turns."""
    found = []
    for user in row.get("users") or ():
        usage = (user.get("usage") or {}).get("gpus")
        past = "" if usage is None else f", usage {_part(usage)}"
        found.append(f"{cell(user['user'] or '(none)')} {number(user['gpus'])} GPUs, {number(user['pending'])} pending{past}")
    return "; ".join(found) or "-"


def _time(field: str) -> Column:
    def shown(row: Row) -> str:
        seconds = row.get(f"{field}_s")
        return "-" if seconds is None else format_duration(seconds)

    return (field.replace("_", " ").upper(), shown)


QUEUES: tuple[Column, ...] = (
    ("QUEUE", _name),
    ("STATE", _state),
    ("QUOTA", lambda row: number(row["quota"].get("gpus"))),
    ("ALLOCATED", lambda row: number(row["allocated"].get("gpus"))),
    ("FAIR SHARE", lambda row: number((row.get("fair_share") or {}).get("gpus"))),
    ("USAGE", _usage),
    ("LIMIT", lambda row: number(row["limit"].get("gpus"))),
    ("WEIGHT", lambda row: number(row["over_quota_weight"].get("gpus"))),
    ("PRIORITY", lambda row: cell(row.get("priority"))),
    ("RUNNING", lambda row: number(row["allocated"].get("jobs"))),
    ("PENDING", lambda row: number(row["pending"].get("jobs"))),
    ("PENDING GPUS", lambda row: number(row["pending"].get("gpus"))),
)
QUEUES_WIDE: tuple[Column, ...] = (
    _of("quota", "cpus"),
    _of("allocated", "cpus"),
    _of("limit", "cpus"),
    _memory("quota"),
    _memory("allocated"),
    _memory("limit"),
    ("MODELS", _models),
    ("USERS", _users),
    _time("reclaim_min_runtime"),
    _time("preempt_min_runtime"),
    _time("usage_half_life"),
    ("LOST FOR IT", lambda row: gpu_time(row.get("lost_gpu_s"))),
    ("ORDER", lambda row: cell(row.get("order"))),
    ("USER FAIRNESS", lambda row: cell(row.get("user_fairness"))),
)


@click.command()
@click.option("--file", "as_file", is_flag=True, help="Print the declaration as a cluster file, for `gangline apply`.")
@output_options
@click.pass_context
def queues(ctx: click.Context, as_file: bool, out: Output) -> None:
    """List queues as a tree. QUOTA, ALLOCATED, FAIR SHARE and LIMIT are GPUs, `-` is unlimited; -o wide adds GPU models, users and the rest."""
    found = client_of(ctx).queues()
    if as_file:
        from gangline.core.model.clusterfile import words_to_yaml

        click.echo(words_to_yaml(found["declared"] or {"queues": {"default": {}}}), nl=False)
        return
    out.rows(found["queues"], QUEUES, QUEUES_WIDE, "queues")
    if out.for_people and not found["index"]:
        click.echo(
            "no queues are declared: a job may name any, and all are open and unlimited; `gangline apply -f FILE` declares some", err=True
        )
