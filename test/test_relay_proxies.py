"""The hub behind nginx and behind Caddy, configured as docs/operations.md shows them: the relay passes."""

import re
import shutil
import unittest

import harness
import netlab
from harness import SOURCE, TINY
from test_relay import N, PROMPT, Hub, RelayTest


def documented(pattern):
    """A block of the page, so that what is tested is what is read."""
    return re.search(pattern, (SOURCE / "docs" / "operations.md").read_text(), re.S).group(1)


def replaced(text, changes):
    for old, new in changes.items():
        assert old in text, f"{old!r} is not in the page's configuration any more"
        text = text.replace(old, new)
    return text


def program(name):
    return shutil.which(name) or shutil.which(f"/usr/sbin/{name}")


class BehindProxy(RelayTest):
    def check_relayed(self, hub, proxy, url, certificate):
        hub.url = url
        workers = [self.relayed_worker(hub, [path], f"w{i}", extra=["--relay-ca", certificate])
                   for i, path in enumerate(harness.three_slices(TINY, self.folder))]
        server = self.backbone(hub, [w.link for w in workers], KVASIR_RELAY_CA=certificate)
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.check_all_remote(server)
        self.assertTrue(proxy.running())
        self.no_secret_in(proxy, hub, server, *workers)


@unittest.skipUnless(program("nginx"), "needs nginx")
class BehindNginx(BehindProxy):
    def nginx(self, hub):
        port = harness.unused_port()
        certificate, key = netlab.certificate(self.folder, "DNS:localhost")
        server = replaced(documented(r"```nginx\n(map .*?)```"),
                          {"listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "hub.example": "localhost",
                           "/etc/ssl/hub/fullchain.pem": str(certificate), "/etc/ssl/hub/key.pem": str(key), "http://127.0.0.1:8080": hub.url})
        config = self.folder / "nginx.conf"
        paths = "".join(f"{kind}_temp_path {self.folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        config.write_text(f"daemon off; master_process off; pid {self.folder}/nginx.pid; error_log stderr;\n"
                          f"events {{}}\nhttp {{ access_log {self.folder}/access.log;\n{paths}{server}}}\n")
        process = self.start(harness.Process([program("nginx"), "-c", config, "-p", self.folder, "-e", "stderr"]))
        return process, f"https://localhost:{port}", certificate

    def test_relayed_through_the_proxy(self):
        hub = self.start(Hub(self.folder, extra=["--trust-proxy"]))
        self.check_relayed(hub, *self.nginx(hub))
        log = (self.folder / "access.log").read_text()
        for secret in (self.worker_token, self.backbone_token):
            self.assertNotIn(secret, log)


@unittest.skipUnless(program("caddy"), "needs caddy")
class BehindCaddy(BehindProxy):
    def caddy(self, hub):
        port = harness.unused_port()
        certificate, key = netlab.certificate(self.folder, "DNS:localhost")
        site = replaced(documented(r"```\n(hub\.example \{.*?)```"),
                        {"hub.example {": f"https://localhost:{port} {{\n    bind 127.0.0.1\n    tls {certificate} {key}",
                         "127.0.0.1:8080": f"127.0.0.1:{hub.port}"})
        config = self.folder / "Caddyfile"
        # No certificates from the network, no port for its administration, none for plain HTTP.
        config.write_text(f"{{\n    admin off\n    auto_https off\n    storage file_system {self.folder}/caddy\n}}\n{site}")
        env = harness.clean_environment(HOME=self.folder, XDG_DATA_HOME=self.folder / "share", XDG_CONFIG_HOME=self.folder / "config")
        process = self.start(harness.Process([program("caddy"), "run", "--config", config, "--adapter", "caddyfile"], env=env))
        harness.wait_until(lambda: harness.port_is_open(port), f"caddy to listen: {process.describe()}")
        return process, f"https://localhost:{port}", certificate

    def test_relayed_through_the_proxy(self):
        hub = self.start(Hub(self.folder, extra=["--trust-proxy"]))
        self.check_relayed(hub, *self.caddy(hub))


if __name__ == "__main__":
    harness.main()
