# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A throwaway certificate for the proxy, and clients that trust it."""

import ssl
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


class Tls:
    """An authority, and a certificate of the loopback address.

    Args:
        folder: where the files go.

    """

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        self.both = folder / "both.pem"
        self.certificate.write_bytes(
            b"".join(c.bytes() for c in issued.cert_chain_pems)
        )
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.both.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
        # The proxy's flags.
        self.args = ["--ssl-certfile", str(self.certificate)]
        self.args += ["--ssl-keyfile", str(self.key)]
        self.trust = self.client()

    def client(self) -> ssl.SSLContext:
        """A client's settings of its own, with which the certificate is valid."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    def encrypted_key(self) -> bytes:
        """The key as a file that asks for a password."""
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        return key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
