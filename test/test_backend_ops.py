"""llama.cpp's own test-backend-ops on the plugin's device.

It ends with status 0 when it ran no case at all, so the cases are counted: the device must take
each MUL_MAT_ID that the CPU takes, and every one that is run must be right.
"""

import csv
import io
import os
import re
import unittest

import harness
from harness import SystemTest
from test_upload import tool

# Products of a few matrices of a few hundred values; those of 2048 and more rows take minutes to
# make and are the same code.
QUICK = r",n=1[067],k=[0-9]{1,3},"
ALL_BUT_LARGE = r",k=[0-9]{1,3},"


class BackendOps(SystemTest):
    environment = staticmethod(lambda: harness.plugin_environment(["127.0.0.1:1"], KVASIR_CONNECT_MS=100))

    def cases(self, device):
        """The MUL_MAT_ID cases the tool knows that `device` supports."""
        done = harness.run([tool("test-backend-ops"), "support", "-b", device, "-o", "MUL_MAT_ID", "--output", "csv"], env=self.environment())
        start = done.stdout.index('"backend_name"')
        rows = csv.DictReader(io.StringIO(done.stdout[start:]))
        return {row["op_params"] for row in rows if row["backend_name"] == device and row["supported"] == "1"}

    def test_as_many_cases_as_the_cpu(self):
        cpu = self.cases("CPU")
        self.assertGreater(len(cpu), 900)
        self.assertEqual(self.cases("KVASIR0"), cpu)

    def check(self, pattern):
        expected = {case for case in self.cases("CPU") if re.search(pattern, case)}
        self.assertGreater(len(expected), 100)
        done = harness.run([tool("test-backend-ops"), "test", "-b", "KVASIR0", "-o", "MUL_MAT_ID", "-p", pattern], env=self.environment(),
                           timeout=1800)
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        right = {case for case, verdict in re.findall(r"^\s*MUL_MAT_ID\((.*)\): (\w+)", text, re.M) if verdict == "OK"}
        self.assertEqual(right, expected)

    def test_results_of_some(self):
        self.check(QUICK)

    @unittest.skipUnless(os.environ.get("KVASIR_LONG"), "minutes: set KVASIR_LONG=1")
    def test_results_of_all(self):
        self.check(ALL_BUT_LARGE)


if __name__ == "__main__":
    harness.main()
