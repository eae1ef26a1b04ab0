"""System tests of a build with sanitizers: what the stock llama.cpp needs to load such a plugin, and that no finding of
any process is missed, whatever becomes of its exit status.

llama.cpp and ggml are Debian's and not instrumented. With the sanitizer's library loaded first they use its allocator and
its locks all the same, so that every byte that they hand to the plugin, or take from it, is known.
"""

import atexit
import functools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent / "sanitizers"
LIBRARY = re.compile(r"^\s*lib[at]san\.so\S* => (\S+)", re.M)


@functools.cache
def library(program):
    """The sanitizer's library that `program` is linked with, or None."""
    if not program.exists():
        return None
    found = LIBRARY.search(subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout)
    return found and found.group(1)


def preloaded(plugin, *others):
    """A value for LD_PRELOAD under which a program that is not instrumented loads the plugin; None for the plain one."""
    return ":".join(str(path) for path in (library(plugin), *others) if path) or None


@functools.cache
def reports_folder():
    """Where every process that this one starts writes its findings from now on."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-sanitizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Beside GCC's AddressSanitizer UBSan writes to standard error alone; it ends the program, and AddressSanitizer reports that.
    for name, options in (("ASAN", ":handle_abort=1"), ("UBSAN", ":abort_on_error=1:print_stacktrace=1"),
                          ("LSAN", f":print_suppressions=0:suppressions='{FOLDER}/lsan.supp'"),
                          ("TSAN", f":print_suppressions=0:suppressions='{FOLDER}/tsan.supp':ignore_noninstrumented_modules=1")):
        before = os.environ.get(f"{name}_OPTIONS")
        os.environ[f"{name}_OPTIONS"] = f"log_path={folder / name.lower()}{options}" + (f":{before}" if before else "")
    return folder


def take_reports():
    """What was found since the last call."""
    text = ""
    for path in sorted(reports_folder().iterdir()):
        text += f"{path.name}:\n{path.read_text(errors='replace')}\n"
        path.unlink()
    return text
