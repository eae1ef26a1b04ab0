"""The hub behind nginx, configured as docs/operations.md shows it: the relay passes, and a stopped proxy is survived."""

import re
import shutil
import unittest

import harness
import netlab
from harness import SOURCE, TINY
from test_relay import N, PROMPT, Hub, RelayTest


def documented_server():
    """The server block of the page, so that what is tested is what is read."""
    text = (SOURCE / "docs" / "operations.md").read_text()
    return re.search(r"```nginx\n(map .*?)```", text, re.S).group(1)


@unittest.skipUnless(shutil.which("nginx") or shutil.which("/usr/sbin/nginx"), "needs nginx")
class BehindNginx(RelayTest):
    def nginx(self, hub):
        port = harness.unused_port()
        certificate, key = netlab.certificate(self.folder, "DNS:localhost")
        server = documented_server()
        for old, new in {"listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "hub.example": "localhost",
                         "/etc/ssl/hub/fullchain.pem": str(certificate), "/etc/ssl/hub/key.pem": str(key),
                         "http://127.0.0.1:8080": hub.url}.items():
            self.assertIn(old, server)
            server = server.replace(old, new)
        config = self.folder / "nginx.conf"
        paths = "".join(f"{kind}_temp_path {self.folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        config.write_text(f"daemon off; master_process off; pid {self.folder}/nginx.pid; error_log stderr;\n"
                          f"events {{}}\nhttp {{ access_log {self.folder}/access.log;\n{paths}{server}}}\n")
        nginx = shutil.which("nginx") or "/usr/sbin/nginx"
        process = self.start(harness.Process([nginx, "-c", config, "-p", self.folder, "-e", "stderr"]))
        return process, f"https://localhost:{port}", certificate

    def test_relayed_through_the_proxy(self):
        hub = self.start(Hub(self.folder, extra=["--trust-proxy"]))
        proxy, url, certificate = self.nginx(hub)
        hub.url = url
        workers = [self.relayed_worker(hub, [path], f"w{i}", extra=["--relay-ca", certificate])
                   for i, path in enumerate(harness.three_slices(TINY, self.folder))]
        server = self.backbone(hub, [w.link for w in workers], KVASIR_RELAY_CA=certificate)
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.check_all_remote(server)
        self.assertTrue(proxy.running())
        log = (self.folder / "access.log").read_text()
        self.no_secret_in(proxy, hub, server, *workers)
        for secret in (self.worker_token, self.backbone_token):
            self.assertNotIn(secret, log)


if __name__ == "__main__":
    harness.main()
