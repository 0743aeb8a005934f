"""A client of etcd (v3), by its JSON gateway: one connection."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.etcd_keys import Body, EtcdAway, LeaseGone
from megatron_ft.job.rules.messages import EtcdSettings
from megatron_ft.link.base.wording import printable

ANSWER_S = 3.0
"""Seconds for which an answer is waited for."""
_AUTHENTICATE = "auth/authenticate"
_NOT_FOUND, _DENIED, _UNAUTHENTICATED, _UNSERVED = 5, 7, 16, 12  # codes of gRPC
_MISTAKES = ("authentication failed", "user name is empty", "authentication is not enabled", "permission denied")
_TLS_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The other end has gone; any other error of TLS is one of certificates, or no TLS is spoken there."""
_TOKEN_IS_OLD = ("invalid auth token", "revision of auth store is old")


class EtcdClient:
    """A `Call`, for any thread. The connection is kept as long as it works.

    Raises:
        ConfigError: the certificates can't be used.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._tls: ssl.SSLContext | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._one_at_a_time = threading.RLock()
        if settings.protocol == "https":
            try:
                self._tls = ssl.create_default_context(cafile=settings.cacert or None)
                if settings.cert:
                    self._tls.load_cert_chain(settings.cert, settings.key or None)
            except OSError as error:  # an ssl.SSLError is one
                files = ", ".join(filter(None, (settings.cacert, settings.cert, settings.key)))
                raise ConfigError(f"--rdzv-conf: the certificates ({files}) can't be used: {error}") from None

    def __call__(self, path: str, body: Body) -> Body:
        """Send a request, and return the answer.

        Raises:
            EtcdAway: there is none, or etcd is out of order.
            LeaseGone: there is no such lease.
            ConfigError: etcd lets this client in neither now nor later, or is none.
        """
        settings = self._settings
        with self._one_at_a_time:
            for is_last in (False, True):
                if settings.user and not self._token and path != _AUTHENTICATE:
                    self._token = self(_AUTHENTICATE, {"name": settings.user, "password": settings.password})["token"]
                status, answer = self._post(path, body)
                if status == http.HTTPStatus.OK:
                    return answer
                if is_last or not self._token or not any(text in str(answer["message"]) for text in _TOKEN_IS_OLD):
                    break
                self._token = ""  # it is too old, or users have been changed
        text, code = _shown(str(answer["message"]).encode()), answer.get("code")
        if code == _NOT_FOUND:
            raise LeaseGone(text)
        is_mistake = code in (_DENIED, _UNAUTHENTICATED, _UNSERVED) or any(each in text for each in _MISTAKES)
        raise (ConfigError if is_mistake else EtcdAway)(f"{self._where}: {text}")

    def _post(self, path: str, body: Body) -> tuple[int, Body]:
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        try:
            if self._connection is None:
                host, port = self._settings.host, self._settings.port
                if self._tls is None:
                    self._connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
                else:
                    self._connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=self._tls)
            connection = self._connection
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            is_mistake = isinstance(error, ssl.SSLError) and not isinstance(error, _TLS_ENDS)
            kind = ConfigError if is_mistake else EtcdAway
            cut = self._tls is not None and not self._settings.cert and isinstance(error, (*_TLS_ENDS, ConnectionError))
            hint = " (if it asks for certificates: --rdzv-conf cert=FILE,key=FILE)" if cut else ""
            raise kind(f"{self._where}: {getattr(error, 'strerror', None) or error or 'no answer'}{hint}") from None
        try:
            answer: Any = json.loads(data)
        except ValueError:
            answer = None
        parts = ("header", "result") if status == http.HTTPStatus.OK else ("message",)
        if isinstance(answer, dict) and not answer.keys().isdisjoint(parts):
            return status, answer
        raise ConfigError(f"{self._where} is no etcd with the JSON gateway of v3: {status} {_shown(data)}")

    @property
    def _where(self) -> str:
        return f"etcd at {self._settings.protocol}://{self._settings.host}:{self._settings.port}"


def _shown(data: bytes) -> str:
    return printable(data.decode(errors="replace").strip()[:200])
