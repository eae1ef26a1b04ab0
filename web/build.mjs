// Builds web/src into web/dist. `node build.mjs DIR` writes to another folder, so that a test
// can compare. The same sources and the pinned esbuild give the same bytes.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "dist");
mkdirSync(out, { recursive: true });

// What test/test_web.py counts again, without npm: whether dist was forgotten.
const hash = createHash("sha256");
for (const name of readdirSync(join(here, "src")).sort()) hash.update(name).update("\0").update(readFileSync(join(here, "src", name)));
for (const name of ["build.mjs", "package.json", "package-lock.json"]) hash.update(readFileSync(join(here, name)));
const sources = hash.digest("hex");

await build({
  absWorkingDir: here,
  entryPoints: ["src/app.ts", "src/app.css"],
  bundle: true,
  minify: true,
  target: ["es2022", "chrome100", "firefox100", "safari16"],
  charset: "utf8",
  legalComments: "eof",
  banner: { js: `/* Kvasir. Sources ${sources} */` },
  outdir: out,
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "src", name), join(out, name));
// The operating system's byte in the header differs between machines.
const packed = gzipSync(readFileSync(join(out, "app.js")), { level: 9 });
packed[9] = 255;
writeFileSync(join(out, "app.js.gz"), packed);
