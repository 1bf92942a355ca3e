"""The Flower examples load, and the certificates they make are accepted."""

from __future__ import annotations

import runpy
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_app_loads():
    script = (
        "from hospitals.server_app import app as server; from hospitals.client_app import app\n"
        "assert {'query.fedcohort', 'train.fedcohort_probe'} <= set(app._registered_funcs)"
    )
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=EXAMPLES / "flower-deployment", check=True)


def test_a_connection_with_the_examples_certificates_is_encrypted_and_verified(tmp_path):
    keys = runpy.run_path(str(EXAMPLES / "flower-deployment" / "keys.py"))
    keys["make_authority"](tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(200)

        def answer():
            connection, _ = listener.accept()
            with server.wrap_socket(connection, server_side=True) as secure:
                secure.sendall(b"hello")

        thread = threading.Thread(target=answer)
        thread.start()
        client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        with (
            socket.create_connection(listener.getsockname(), timeout=200) as plain,
            client.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            assert secure.recv(5) == b"hello"
        thread.join()


def test_a_nodes_private_key_is_its_owners(tmp_path):
    keys = runpy.run_path(str(EXAMPLES / "flower-deployment" / "keys.py"))
    keys["make_node_key"](tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "key.pub").read_bytes().startswith(b"ecdsa-sha2-nistp384 ")
