"""Reading the roles of a job, and writing them back. The fields of a role are in the table that jobfile.py gives; the rules are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from gangline.core.model.fields import Fields, Later, Reader, Reading, read_mapping
from gangline.core.model.problems import show
from gangline.core.model.roles import MAX_LEAVES, leaf_count, rank_count
from gangline.core.model.spec import Gang, Resources, Role, TopologyRequest

#: roles of one job, groups counted, and how deep groups are inside of one another
MAX_ROLES: Final = 256
MAX_DEPTH: Final = 4
#: stands for the job's own, which a role has that says nothing
INHERITED: Final = Resources()
#: fields of ranks, which a group of roles has not
_OF_RANKS: Final = ("ranks", "min_ranks", "ranks_per_node", "resources", "command", "env")


def roles_reader(fields: Fields, check_gang: Callable[[Reading, str, dict[str, Any], dict[str, Any]], Gang], later: Later) -> Reader:
    """Read a list of roles by a table of their fields, that of the inner ones aside; `check_gang` makes the gang of what was found."""

    def read(reading: Reading, at: str, value: Any) -> tuple[Role, ...] | None:
        return _roles(reading, at, value, 1)

    def _roles(reading: Reading, at: str, value: Any, depth: int) -> tuple[Role, ...] | None:
        if value == []:
            return None
        if type(value) is not list:
            reading.wrong(at, value, "a list of roles, as [{name: learner, ranks: 2}, {name: actor, ranks: 8}]")
            return None
        if depth > MAX_DEPTH:
            reading.refuse(at, "GL-1110", f"Roles are at most {MAX_DEPTH} deep inside of one another.")
            return None
        if len(value) > MAX_ROLES:
            reading.refuse(at, "GL-1110", f"{len(value):,} roles are more than the limit of {MAX_ROLES}.")
            return None
        found = [_role(reading, f"{at}/{i}", item, depth) for i, item in enumerate(value)]
        return tuple(role for role in found if role is not None) if None not in found else None

    def _role(reading: Reading, at: str, value: Any, depth: int) -> Role | None:
        inner: Fields = {"roles": ("roles", lambda r, p, v: _roles(r, p, v, depth + 1))}
        found = read_mapping(reading, at, value, {**fields, **inner}, later)
        if found is None:
            return None
        before = len(reading.problems)
        if not found.get("name"):
            reading.refuse(at, "GL-1103", "The role has no name; each has one of its own.")
        _check_replicas(reading, at, found)
        gang = check_gang(reading, at, value, {word: found.pop(word) for word in ("ranks", "min_ranks", "ranks_per_node") if word in found})
        if value.get("roles"):
            _check_group(reading, at, value, found)
        if len(reading.problems) > before:
            return None
        found.setdefault("min_replicas", found.get("replicas", 1))
        return Role(**{"resources": INHERITED, **found}, gang=gang)

    return read


def _check_replicas(reading: Reading, at: str, found: dict[str, Any]) -> None:
    replicas = found.get("replicas", 1)
    fewest = found.get("min_replicas", replicas)
    if fewest > replicas:
        reading.refuse(f"{at}/min_replicas", "GL-1108", f"min_replicas {fewest} is more than replicas {replicas}.")


def _check_group(reading: Reading, at: str, value: dict[str, Any], found: dict[str, Any]) -> None:
    for word in _OF_RANKS:
        if value.get(word) is not None:
            message = f"{word} is of ranks, and this role is a group of other roles: give it to these."
            reading.refuse(f"{at}/{word}", "GL-1108", message, key=True)
    topology: TopologyRequest = found.get("topology", TopologyRequest())
    word = "balanced" if topology.balanced else "spread" if topology.spread else ""
    if word and found.get("replicas", 1) == 1:
        message = f"{word} is of the replicas of a group, and this one has no replicas: give them, or {word} to a role inside."
        reading.refuse(f"{at}/topology/{word}", "GL-1108", message)


def check_beside_roles(reading: Reading, job: dict[str, Any]) -> None:
    """Note what is wrong with the names and commands of roles, and with fields of the job beside them. `job` is as it was written."""
    if job.get("gang") is not None:
        reading.refuse("/gang", "GL-1108", "gang and roles are both given; with roles, each of them says how many ranks it has.", key=True)
    elastic = job.get("elastic")
    if isinstance(elastic, dict) and elastic.get("step") is not None:
        message = "step is of a job of one kind of rank; roles grow by ranks, or by nodes full of them where ranks_per_node is given."
        reading.refuse("/elastic/step", "GL-1108", message, key=True)
    topology = job.get("topology")
    for word in ("balanced", "spread"):
        if isinstance(topology, dict) and topology.get(word):
            reading.refuse(f"/topology/{word}", "GL-1108", f"{word} is of one kind of rank; with roles, give it to one of them.")
    names: dict[str, str] = {}
    number = 0
    for at, role in _as_written(job["roles"], "/roles", 1):
        number += 1
        name = role.get("name")
        if isinstance(name, str) and name and names.setdefault(name, at) != at:
            reading.refuse(f"{at}/name", "GL-1108", f"{show(name)} is the name of another role of the job, {names[name]}.")
        if job.get("command") is None and role.get("command") is None and not role.get("roles"):
            message = "The role has no command, and neither has the job: a list of texts, as [python, train.py]."
            reading.refuse(at, "GL-1103", message)
    if number > MAX_ROLES:
        reading.refuse("/roles", "GL-1110", f"{number:,} roles are more than the limit of {MAX_ROLES}.")


def _as_written(roles: Any, at: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, role in enumerate(roles if isinstance(roles, list) and depth <= MAX_DEPTH else ()):
        if isinstance(role, dict):
            yield f"{at}/{i}", role
            yield from _as_written(role.get("roles"), f"{at}/{i}/roles", depth + 1)


def check_roles(reading: Reading, roles: tuple[Role, ...], most_ranks: int) -> None:
    """Note what is wrong with the roles in all."""
    if leaf_count(roles) > MAX_LEAVES:
        message = f"{leaf_count(roles):,} roles and replicas of roles are more than the limit of {MAX_LEAVES:,}."
        reading.refuse("/roles", "GL-1110", message)
    if rank_count(roles) > most_ranks:
        reading.refuse("/roles", "GL-1110", f"{rank_count(roles):,} ranks in all are more than the limit of {most_ranks:,}.")
    if not _is_needed(roles):
        reading.refuse("/roles", "GL-1108", "No role is needed: at least one has min_ranks, and min_replicas, of 1 or more.")


def _is_needed(roles: tuple[Role, ...]) -> bool:
    return any(role.min_replicas and (_is_needed(role.roles) if role.roles else role.gang.min_ranks) for role in roles)


def with_resources(roles: tuple[Role, ...], resources: Resources) -> tuple[Role, ...]:
    """Return the roles; those that say nothing of their resources get these."""
    return tuple(
        msgspec.structs.replace(
            role, resources=resources if role.resources is INHERITED and not role.roles else role.resources,
            roles=with_resources(role.roles, resources),
        )
        for role in roles
    )  # fmt: skip


def role_words(role: Role, resources: Callable[[Resources], Any], topology: Callable[[TopologyRequest], Any]) -> dict[str, Any]:
    """Return a role in the words of the job file, defaults written out; empty values may be in it."""
    of_all = {"replicas": role.replicas, "min_replicas": role.min_replicas, "topology": topology(role.topology)}
    if role.roles:
        return {"name": role.name, **of_all, "roles": [role_words(inner, resources, topology) for inner in role.roles]}
    return {
        "name": role.name,
        "ranks": role.gang.ranks,
        "min_ranks": role.gang.min_ranks,
        "ranks_per_node": role.gang.ranks_per_node,
        **of_all,
        "resources": resources(role.resources),
        "command": list(role.command),
        "env": dict(role.env),
    }
