"""Certificates and kubeconfigs of one cluster: its own CA, P-256 keys, valid for ten years."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

YEARS = datetime.timedelta(days=3650)
_CA_USAGE = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """The cluster's certificate authority and all its files, in one folder. An empty folder gets a new authority."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.crt"
        self._name = _name("spotune-testcluster")
        if not self.certificate.exists():
            self._begin()
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(self._name, self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_CA_USAGE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write_key(self.directory / "ca.key", key)
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, file: str, user: str, group: str = "", addresses: Sequence[str] = ()) -> None:
        """Write `file`.crt and `file`.key for `user` of `group`.

        Args:
            file: The files' stem in the authority's folder.
            user: The common name, which is the user name in Kubernetes.
            group: The organisation, which is the group in Kubernetes.
            addresses: Host names and IP addresses of a server; empty for a client.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(_name(user, group), self._name, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)  # Python 3.13 requires it
        if addresses:
            names = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.directory / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(self.directory / f"{file}.key", key)

    def kubeconfig(self, file: Path, name: str, server: str, user: str, group: str = "") -> None:
        """Write a kubeconfig for `user` of `group` at `server`; its only context is `name`."""
        self.issue(file.stem, user, group)
        certificate = str(self.directory / f"{file.stem}.crt")
        key = str(self.directory / f"{file.stem}.key")
        cluster = {"server": server, "certificate-authority": str(self.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": user, "user": {"client-certificate": certificate, "client-key": key}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
            "current-context": name,
        }
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        file.chmod(0o600)

    def service_account_keys(self) -> None:
        """Write sa.key and sa.pub, with which the API server signs and verifies service-account tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(self.directory / "sa.key", key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.directory / "sa.pub").write_bytes(public)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + YEARS)
    )


def _name(common_name: str, organisation: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organisation:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    return x509.Name(attributes)


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(pem)
