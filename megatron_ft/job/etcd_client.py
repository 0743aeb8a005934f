"""A client of etcd (v3), by its JSON gateway: one connection."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.etcd_keys import Body, EtcdAway
from megatron_ft.job.rules.messages import EtcdSettings
from megatron_ft.link.base.wording import printable

ANSWER_S = 3.0
"""Seconds for which an answer is waited for."""
_AUTHENTICATE = "auth/authenticate"
_NO_LEASE = 5  # a code of gRPC, as these
_INVALID = (3, 16)
"""The request, or the user; with a token: it may be too old."""
_MISTAKES = (*_INVALID, 7, 9, 12)
"""Those, a user without the right, one where etcd has no users, and a service that is off."""
_TLS_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The other end has gone; any other error of TLS is one of certificates, or no TLS is spoken there."""


class EtcdClient:
    """A `Call`, for any thread. The connection is kept as long as it works.

    Raises:
        ConfigError: the certificates can't be used.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings, self._token, self._one_at_a_time = settings, "", threading.RLock()
        self._where = f"etcd at {settings.protocol}://{settings.host}:{settings.port}"
        self._connection = http.client.HTTPConnection(settings.host, settings.port, timeout=ANSWER_S)
        if settings.protocol == "http":
            return
        try:
            tls = ssl.create_default_context(cafile=settings.cacert or None)
            if settings.cert or settings.key:
                tls.load_cert_chain(settings.cert, settings.key or None)
        except OSError as error:  # an ssl.SSLError is one
            files = ", ".join(filter(None, (settings.cacert, settings.cert, settings.key)))
            raise ConfigError(f"--rdzv-conf: the certificates ({files}) can't be used: {error}") from None
        self._connection = http.client.HTTPSConnection(settings.host, settings.port, timeout=ANSWER_S, context=tls)

    def __call__(self, path: str, body: Body) -> Body:
        """Send a request, and return the answer.

        Raises:
            EtcdAway: there is none, or etcd is out of order.
            ConfigError: etcd lets this client in neither now nor later, or is none.
        """
        settings = self._settings
        with self._one_at_a_time:
            for _ in range(2):
                if (settings.user or settings.password) and not self._token and path != _AUTHENTICATE:
                    self._token = self(_AUTHENTICATE, {"name": settings.user, "password": settings.password})["token"]
                status, answer = self._post(path, body)
                if status == http.HTTPStatus.OK:
                    return answer
                code = answer.get("code")
                if not self._token or code not in _INVALID:
                    break
                self._token = ""  # it is too old, or users have been changed
        if code == _NO_LEASE:
            return {}
        text = _shown(str(answer.get("message")).encode())
        raise (ConfigError if code in _MISTAKES else EtcdAway)(f"{self._where}: {text}")

    def _post(self, path: str, body: Body) -> tuple[int, Body]:
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        try:
            self._connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = self._connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens it again
            text = f"{self._where}: {getattr(error, 'strerror', None) or error or 'no answer'}"
            if isinstance(error, ssl.SSLError) and not isinstance(error, _TLS_ENDS):
                raise ConfigError(text) from None
            asks = self._settings.protocol == "https" and not self._settings.cert
            hint = " (if it asks for certificates: --rdzv-conf cert=FILE,key=FILE)" if asks else ""
            raise EtcdAway(text + hint) from None
        try:
            answer: Any = json.loads(data)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and answer.keys() & (
            {"header", "result"} if status == http.HTTPStatus.OK else {"message"}
        ):
            return status, answer
        raise ConfigError(f"{self._where} is no etcd with the JSON gateway of v3: {status} {_shown(data)}")


def _shown(data: bytes) -> str:
    return printable(data.decode(errors="replace").strip()[:200])
