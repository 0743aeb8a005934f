"""etcd as its JSON gateway shows it: keys with revisions, transactions, leases that expire by the clock of a test."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from megatron_ft.job.rules.etcd_keys import Body, EtcdAway

__all__ = ["EtcdModel"]


@dataclass
class _Key:
    value: str
    create: int
    mod: int
    lease: str

    def shown(self, name: str) -> Body:
        return {
            "key": base64.b64encode(name.encode()).decode(),
            "value": self.value,
            "create_revision": str(self.create),
            "mod_revision": str(self.mod),
            "lease": self.lease,
        }


@dataclass
class EtcdModel:
    """A `Call`. ``is_away``: it doesn't answer. ``loses_answers``: it does what it is asked for, and doesn't say so.

    ``refuses``: a path at which it can't do anything.
    """

    now_s: float = 0.0
    is_away: bool = False
    loses_answers: int = 0
    refuses: str = ""
    revision: int = 1
    keys: dict[str, _Key] = field(default_factory=dict)
    leases: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each lease the seconds that it is for, and when it expires."""
    calls: list[str] = field(default_factory=list)
    """Paths of all calls."""
    _was_away: bool = False

    def __call__(self, path: str, body: Body) -> Body:
        self.calls.append(path)
        self._was_away |= self.is_away
        if self.is_away:
            raise EtcdAway("etcd at http://etcd:2379: Connection refused")
        if self._was_away:
            self.restart()
        self._expire()
        if path == self.refuses:
            raise EtcdAway("etcd at http://etcd:2379: database space exceeded")
        answer = self._answer(path, body)
        if self.loses_answers:
            self.loses_answers -= 1
            raise EtcdAway("etcd at http://etcd:2379: timed out")
        return {} if answer is None else {"header": {"revision": str(self.revision)}, **answer}

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._expire()

    def restart(self) -> None:
        """As after an outage, or a change of its own leader: every lease begins anew."""
        self._was_away = False
        self.leases = {lease: (ttl_s, self.now_s + ttl_s) for lease, (ttl_s, _) in self.leases.items()}

    def names(self) -> list[str]:
        """Return the keys' names."""
        self._expire()
        return sorted(self.keys)

    def _answer(self, path: str, body: Body) -> Body | None:
        if path == "kv/range":
            return self._range(body)
        if path == "kv/txn":
            return self._transact(body)
        if path == "lease/grant":
            lease = str(1000 + len(self.calls))
            self.leases[lease] = (float(body["TTL"]), self.now_s + float(body["TTL"]))
            return {"ID": lease, "TTL": body["TTL"]}
        assert path in ("lease/keepalive", "lease/revoke"), path
        lease = body["ID"]
        if path == "lease/keepalive":
            if lease not in self.leases:
                return {"result": {"ID": lease}}
            ttl_s = self.leases[lease][0]
            self.leases[lease] = (ttl_s, self.now_s + ttl_s)
            return {"result": {"ID": lease, "TTL": f"{ttl_s:.0f}"}}
        if lease not in self.leases:
            return None
        self._end([lease])
        return {}

    def _expire(self) -> None:
        self._end([lease for lease, (_, until_s) in self.leases.items() if until_s <= self.now_s])

    def _end(self, leases: list[str]) -> None:
        gone = [name for name, key in self.keys.items() if key.lease in leases]
        self.revision += bool(gone)
        for name in gone:
            del self.keys[name]
        for lease in leases:
            del self.leases[lease]

    def _range(self, body: Body) -> Body:
        name = _plain(body["key"])
        return {"kvs": [self.keys[name].shown(name)], "count": "1"} if name in self.keys else {}

    def _transact(self, body: Body) -> Body | None:
        succeeded = all(self._holds(each) for each in body.get("compare", []))
        branch = body.get("success" if succeeded else "failure", [])
        for each in branch:
            put = each.get("request_put", {})
            if put.get("lease") and put["lease"] not in self.leases:
                return None
        if any("request_range" not in each for each in branch):
            self.revision += 1
        responses = [self._carry_out(each) for each in branch]
        return {**({"succeeded": True} if succeeded else {}), "responses": responses}

    def _carry_out(self, request: Body) -> Body:
        ((what, body),) = request.items()
        name = _plain(body["key"])
        if what == "request_range":
            return {"response_range": self._range(body)}
        old = self.keys.get(name)
        create = self.revision if old is None else old.create
        self.keys[name] = _Key(body["value"], create, self.revision, body.get("lease", ""))
        return {"response_put": {}}

    def _holds(self, compare: Body) -> bool:
        assert compare["result"] == "EQUAL"
        key = self.keys.get(_plain(compare["key"]))
        what = compare["target"].lower()
        assert what in ("create", "mod")
        return (0 if key is None else int(getattr(key, what))) == int(compare[f"{what}_revision"])


def _plain(text: str) -> str:
    return base64.b64decode(text).decode()
