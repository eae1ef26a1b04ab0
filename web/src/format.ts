// Numbers as people read them, and small helpers for the page.

export function count(n: number): string {
  if (n >= 1e9) return `${digits(n / 1e9)} G`;
  if (n >= 1e6) return `${digits(n / 1e6)} M`;
  return n >= 1000 ? String(Math.round(n)).replace(/\B(?=(\d{3})+$)/g, "\u202f") : digits(n);
}

// Few digits, and no zeros after the point.
export function digits(n: number): string {
  if (Number.isInteger(n) || n >= 100) return String(Math.round(n));
  const text = n.toFixed(n >= 1 ? 1 : 2);
  return text.replace(/\.?0+$/, "");
}

function scaled(n: number): [number, string] {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 999.5 && i + 1 < units.length) {
    n /= 1000;
    ++i;
  }
  return [n, units[i]!];
}

export function bytes(n: number): string {
  const [value, unit] = scaled(n);
  return `${digits(value)} ${unit}`;
}

// For columns, where figures stand below each other.
export function bytesInColumn(n: number): string {
  const [value, unit] = scaled(n);
  return `${value.toFixed(1)} ${unit}`;
}

export function percent(share: number): string {
  if (share <= 0 || share >= 1) return `${Math.round(share * 100)} %`;
  // Neither 0 nor 100 while it is not quite.
  return `${Math.min(99.9, Math.max(0.1, share * 100)).toFixed(1)} %`;
}

export function milliseconds(us: number): string {
  return `${(us / 1000).toFixed(1)} ms`;
}

export function element<K extends keyof HTMLElementTagNameMap>(tag: K, text = "", className = ""): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function find<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found as T;
}

// A sentence, and the command that would change it.
export function showEmpty(id: string, sentence: string, command?: string): void {
  const box = find(id);
  const key = sentence + (command ?? "");
  box.hidden = false;
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.replaceChildren(element("p", sentence));
  if (command) {
    const code = element("pre");
    code.append(element("code", command));
    code.tabIndex = 0;
    box.append(code);
  }
}
