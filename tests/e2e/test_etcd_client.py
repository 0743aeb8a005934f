"""The client of etcd against a real one: users, certificates, and what is a mistake of the user."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.job.etcd_client import EtcdClient
from megatron_ft.job.rules.etcd_keys import EtcdAway, Ledger, look, take
from megatron_ft.job.rules.messages import EtcdSettings
from tests.support.etcd_server import EtcdServer
from tests.support.launching import Launcher
from tests.support.nodes import TRAINS_UNTIL_TOLD

PASSWORD = "a very secret word"


def client_of(server: EtcdServer, **more: str) -> EtcdClient:
    return EtcdClient(EtcdSettings(server.host, server.port, **more))


def openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca.pem), and what it has signed for localhost (cert.pem, key.pem)."""
    where = tmp_path_factory.mktemp("certificates")
    ca = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"]
    openssl(where, *ca, "-keyout", "ca.key", "-out", "ca.pem")
    openssl(
        where, *["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node", "-keyout", "key.pem", "-out", "node.csr"]
    )
    (where / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    sign = "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out cert.pem"
    openssl(where, *sign.split())
    return where


def test_user_is_let_in_by_password_also_when_tokens_have_expired(start_etcd: Callable[..., EtcdServer]) -> None:
    server = start_etcd("--auth-token-ttl", "1")
    server.wait_until_up()
    root = client_of(server)
    for path, body in (
        ("auth/user/add", {"name": "root", "password": PASSWORD}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/user/add", {"name": "other", "password": "o"}),
        ("auth/enable", {}),
    ):
        root(path, body)
    with pytest.raises(ConfigError, match="user name is empty"):
        look(root, "job")
    with pytest.raises(ConfigError, match="authentication failed"):
        look(client_of(server, user="root", password="wrong"), "job")
    with pytest.raises(ConfigError, match="permission denied"):
        look(client_of(server, user="other", password="o"), "job")
    client = client_of(server, user="root", password=PASSWORD)
    held = take(client, "job", "a:1")
    assert held is not None
    ledger = Ledger(client, "job", held.epoch, held.lease)
    for _ in range(3):
        time.sleep(2.5)  # a token of etcd lives for twice what it is told, or so
        assert look(client, "job").address == "a:1"
        assert ledger.renew()


def test_nodes_meet_by_an_etcd_that_asks_for_certificates(
    launcher: Launcher, start_etcd: Callable[..., EtcdServer], certificates: Path
) -> None:
    files = {name: str(certificates / f"{name}.pem") for name in ("ca", "cert", "key")}
    tls = ["--cert-file", files["cert"], "--key-file", files["key"], "--client-cert-auth"]
    server = start_etcd(*tls, "--trusted-ca-file", files["ca"], protocol="https")
    given = {"protocol": "https", "cacert": files["ca"], "cert": files["cert"], "key": files["key"]}
    server.wait_until_up(client_of(server, **given))
    with pytest.raises(ConfigError, match=r"certificates .*nothing\.pem"):
        EtcdClient(EtcdSettings("e", 1, "https", "nothing.pem"))
    with pytest.raises(ConfigError, match=r"(?i)verif"):
        look(client_of(server, protocol="https"), "job")
    with pytest.raises(ConfigError, match=r"(?i)certificate"):
        for _ in range(50):
            with contextlib.suppress(EtcdAway):  # its end came before its reason
                look(client_of(server, protocol="https", cacert=files["ca"]), "job")
    conf = ",".join(f"{name}={value}" for name, value in given.items())
    words = ["--nnodes=2", "--rdzv-backend=etcd", f"--rdzv-endpoint={server.endpoint}", f"--rdzv-conf={conf}"]
    (launcher.directory / "finish").touch()
    nodes = [launcher.start(TRAINS_UNTIL_TOLD, *words, script_args=[str(launcher.directory)]) for _ in range(2)]
    assert [node.wait().code for node in nodes] == [0, 0]


@pytest.mark.parametrize(("what", "words"), [("password", "authentication"), ("no etcd", "is no etcd")])
def test_mistake_at_etcd_ends_the_launcher_before_any_rank_with_one_line(
    launcher: Launcher, etcd: EtcdServer, what: str, words: str
) -> None:
    endpoint, conf = etcd.endpoint, ["--rdzv-conf=user=u,password=" + PASSWORD] if what == "password" else []
    if what == "no etcd":
        server = subprocess.Popen(
            ["python3", "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        endpoint = "127.0.0.1:" + server.stdout.readline().split("port ")[1].split()[0]
    try:
        ended = launcher.run("say('began')", "--nnodes=2", "--rdzv-backend=etcd", f"--rdzv-endpoint={endpoint}", *conf)
    finally:
        if what == "no etcd":
            server.kill()
            server.communicate()
    assert (ended.code, "began" in ended.out) == (2, False)
    (line,) = [line for line in ended.err.splitlines() if words in line]
    assert endpoint in line
    assert PASSWORD not in ended.err
