"use strict";
// The trajectory viewer. Every text from a trajectory goes in through textContent; nothing is ever parsed as markup.
const boot = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const PAGE = 50;
const FILTERS = ["q", "verdict", "seeded", "step", "snapshot", "reward_lo", "reward_hi", "seed_lo", "seed_hi", "sort"];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}
const kind = (verdict) => (verdict === "correct" || verdict === "wrong" ? verdict : "other");
const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : Number.isInteger(value) ? value.toLocaleString("en")
    : Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(digits);

// Where rows come from: the server that sent this page, or the bundle inside it. Both answer about, rows and row.
const remote = {
  async ask(what, query) {
    const answer = await fetch(`api/${what}?${new URLSearchParams(query)}`);
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error || answer.statusText);
    return value;
  },
  about() { return this.ask("about", {}); },
  rows(query) { return this.ask("rows", query); },
  row(query) { return this.ask("row", query); },
};

const bundle = {
  waiting: new Map(),
  chunks: new Map(),
  async about() { return boot.about; },
  light(set, n) {
    const row = {};
    for (const [name, values] of Object.entries(boot.index[set])) row[name] = values[n];
    return row;
  },
  async rows(query) {
    const index = boot.index[query.set], problems = boot.problems[query.set], keep = [];
    const wanted = (query.q || "").toLowerCase();
    for (let i = 0; i < index.n.length; i++) {
      if (query.verdict && index.verdict[i] !== query.verdict) continue;
      if (query.step && index.step[i] !== Number(query.step)) continue;
      if (query.snapshot && index.snapshot_step[i] !== Number(query.snapshot)) continue;
      if (query.seeded && (index.seed_length[i] > 0) !== (query.seeded === "yes")) continue;
      if (query.problem && index.problem_id[i] !== query.problem) continue;
      if (query.reward_lo && !(index.reward[i] >= Number(query.reward_lo))) continue;
      if (query.reward_hi && !(index.reward[i] <= Number(query.reward_hi))) continue;
      if (query.seed_lo && !(index.seed_length[i] >= Number(query.seed_lo))) continue;
      if (query.seed_hi && !(index.seed_length[i] <= Number(query.seed_hi))) continue;
      if (wanted && !`${index.row_id[i]}\n${problems[index.problem_id[i]] || ""}`.toLowerCase().includes(wanted)) continue;
      keep.push(i);
    }
    if (query.sort) {
      const column = index[query.sort.replace(/^-/, "")], sign = query.sort.startsWith("-") ? -1 : 1;
      const value = (i) => (column[i] === null ? Infinity : sign * column[i]);
      keep.sort((a, b) => value(a) - value(b) || a - b);
    }
    const offset = Number(query.offset || 0);
    const rows = keep.slice(offset, offset + Number(query.limit || PAGE)).map((i) => {
      const row = this.light(query.set, i);
      return { ...row, snippet: (problems[row.problem_id] || "").slice(0, 140) };
    });
    return { total: keep.length, rows };
  },
  load(set, k) {
    const key = `${set}/${k}`;
    if (!this.chunks.has(key)) {
      this.chunks.set(key, new Promise((resolve, reject) => {
        this.waiting.set(key, resolve);
        const script = document.createElement("script");
        script.src = `rows/${boot.files[set]}-${String(k).padStart(5, "0")}.js`;
        script.onerror = () => reject(new Error(`${script.src} is missing; copy the whole folder`));
        document.head.append(script);
      }));
    }
    return this.chunks.get(key);
  },
  async row(query) {
    const set = query.set, index = boot.index[set];
    const n = query.row_id ? index.row_id.indexOf(query.row_id) : Number(query.n);
    if (!(n >= 0 && n < index.n.length)) throw new Error("no such row");
    const record = boot.rows ? boot.rows[set][n] : (await this.load(set, Math.floor(n / boot.chunk)))[n % boot.chunk];
    const members = [], elsewhere = new Map();
    for (let i = 0; i < index.n.length; i++) {
      if (index.group[i] === record.group) members.push(this.light(set, i));
      if (index.problem_id[i] === record.problem_id) {
        const found = elsewhere.get(index.group[i]) || { group: index.group[i], n: i, step: index.step[i], rows: 0, correct: 0 };
        found.rows += 1;
        found.correct += index.verdict[i] === "correct" ? 1 : 0;
        elsewhere.set(index.group[i], found);
      }
    }
    members.sort((a, b) => a.sample - b.sample);
    return { ...record, members, elsewhere: [...elsewhere.values()] };
  },
};
window.tseedsChunk = (set, k, rows) => bundle.waiting.get(`${set}/${k}`)(rows);
const source = boot.mode === "server" ? remote : bundle;

let about, current, listed = [], total = 0, offset = 0, asked = 0;

// What colours mean. value: of token i; shade: -1 .. 1 (sign picks the hue, size the strength) or a class of its own.
const HUES = { light: { plus: [196, 96, 0], minus: [0, 104, 178], one: [0, 104, 178] },
  dark: { plus: [255, 150, 70], minus: [96, 184, 245], one: [96, 184, 245] } };
const MODES = {
  region: { name: "region", has: () => true, value: () => null },
  behaviour: { name: "log-prob (behaviour)", has: () => true, value: (t, i) => t.behaviour[i], unit: "nats",
    shade: (v) => Math.min(1, -v / 4), ends: ["0", "≤ −4"] },
  ratio: { name: "importance ratio", has: (t) => !!t.ratio, value: (t, i) => t.ratio[i] || null, // 0: the row had no gradient and no ratio was taken
    shade: (v) => Math.max(-1, Math.min(1, Math.log2(v) / 1)), ends: ["≤ ½", "1", "≥ 2"] },
  entropy: { name: "entropy", has: (t) => !!t.entropy, value: (t, i) => t.entropy[i], unit: "nats",
    shade: (v) => Math.min(1, v / 2), ends: ["0", "≥ 2"] },
  clipped: { name: "clipped", has: (t) => !!t.clipped, value: (t, i) => (t.clipped[i] ? 1 : 0), shade: (v) => v,
    ends: ["carries gradient", "clipped"] },
  advantage: { name: "advantage", has: (t) => !!t.advantage, value: (t, i) => t.advantage[i],
    shade: (v) => Math.max(-1, Math.min(1, v)), ends: ["−1", "0", "1"] },
};
const colourOf = (shade) => {
  const hues = HUES[Theme.current()];
  const [r, g, b] = shade < 0 ? hues.minus : mode().ends.length === 3 || $("colour").value === "clipped" ? hues.plus : hues.one;
  return `rgba(${r}, ${g}, ${b}, ${(Math.abs(shade) * 0.62).toFixed(3)})`;
};
const mode = () => MODES[$("colour").value] || MODES.region;

function query() {
  const made = { set: $("set").value };
  FILTERS.forEach((name) => { if ($(name).value) made[name] = $(name).value; });
  return made;
}

function remember() {
  const state = new URLSearchParams(query());
  if (offset) state.set("offset", offset);
  if (current) state.set("row", current.row_id);
  if ($("colour").value !== "region") state.set("colour", $("colour").value);
  history.replaceState(null, "", `#${state}`);
}

function options(select, first, values, label = String) {
  select.replaceChildren(...[["", first], ...values.map((v) => [v, label(v)])].map(([value, text]) => {
    const option = element("option", "", text);
    option.value = value;
    return option;
  }));
}

function chooseSet() {
  const set = about.sets.find((s) => s.id === $("set").value);
  options($("verdict"), "any verdict", set.verdicts.map((v) => v[0]), (v) => `${v} (${set.verdicts.find((x) => x[0] === v)[1]})`);
  const rollouts = set.kind === "rollout";
  options($("step"), rollouts ? "any iteration" : "any policy step", set.steps, (s) => `${rollouts ? "iteration" : "step"} ${s}`);
  options($("snapshot"), "any snapshot", set.snapshots, (s) => `snapshot of step ${s}`);
  $("snapshot").disabled = $("seeded").disabled = !set.snapshots.length;
}

async function refresh() {
  const mine = ++asked;
  const answer = await source.rows({ ...query(), offset, limit: PAGE });
  if (mine !== asked) return;
  ({ rows: listed, total } = answer);
  const last = Math.min(offset + PAGE, total);
  $("count").textContent = total
    ? `${(offset + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${total.toLocaleString("en")} trajectories`
    : "no trajectory fits these filters";
  $("prev").disabled = offset === 0;
  $("next").disabled = last >= total;
  $("list").replaceChildren(...listed.map(item));
  $("list").scrollTop = 0;
  remember();
}

function item(row) {
  const made = element("li"), meta = element("div", "meta");
  made.dataset.n = row.n;
  made.setAttribute("aria-current", String(Boolean(current && current.n === row.n)));
  meta.append(element("span", `badge ${kind(row.verdict)}`, row.verdict || "ungraded"));
  if (row.reward !== null && row.reward !== 0 && row.reward !== 1) meta.append(element("span", "", `reward ${number(row.reward)}`));
  meta.append(element("span", "", `${rollouts() ? "iter" : "step"} ${row.step}`), element("span", "", `#${row.sample}`));
  meta.append(element("span", "", row.seed_length ? `${row.seed_length} + ${row.length - row.seed_length} tokens` : `${row.length} tokens`));
  if (row.snapshot_step !== null && row.seed_length) meta.append(element("span", "", `seed of step ${row.snapshot_step}`));
  made.append(meta, element("div", "what", row.snippet || row.problem_id));
  made.addEventListener("click", () => open({ n: row.n }));
  return made;
}
const rollouts = () => about.sets.find((s) => s.id === $("set").value).kind === "rollout";

async function open(which) {
  current = await source.row({ set: $("set").value, ...which });
  document.querySelectorAll("#list li").forEach((li) => li.setAttribute("aria-current", String(Number(li.dataset.n) === current.n)));
  const there = [...document.querySelectorAll("#list li")].find((li) => Number(li.dataset.n) === current.n);
  if (there) there.scrollIntoView({ block: "nearest" });
  $("nothing").hidden = true;
  $("row").hidden = false;
  show();
  document.querySelector("main").scrollTop = 0;
  remember();
}

function chip(text, className, active, title, which) {
  const made = element("button", `chip ${className}`, text);
  made.type = "button";
  made.title = title;
  made.setAttribute("aria-current", String(active));
  made.addEventListener("click", () => open(which));
  return made;
}

function show() {
  const row = current, t = row.tokens;
  $("head").replaceChildren(element("h2", "", row.row_id), element("span", `badge ${kind(row.verdict)}`, row.verdict || "ungraded"));
  const seeded = row.off_stop > row.off_start;
  const parts = [`reward ${number(row.reward)}`];
  if (row.advantage !== null && row.advantage !== undefined) parts.push(`advantage ${number(row.advantage, 3)}`);
  parts.push(`${row.length} tokens`);
  if (seeded) parts.push(`${row.position === "none" ? "seed" : row.position} of ${row.off_stop - row.off_start} by the snapshot of step ${row.snapshot_step}`);
  if (row.finish_reason === "length") parts.push("truncated");
  $("head").append(element("span", "dim", parts.join(" · ")));

  const group = element("div"), elsewhere = element("div");
  group.append(element("span", "label", "its group"));
  row.members.forEach((m) => group.append(chip(m.sample < 0 ? "greedy" : `#${m.sample}`, `${kind(m.verdict)}${m.seed_length ? " seeded" : ""}`,
    m.n === row.n, `${m.verdict || "ungraded"}${m.seed_length ? `, ${m.seed_length} seed tokens` : ""}`, { n: m.n })));
  $("links").replaceChildren(group);
  if (row.elsewhere.length > 1) {
    elsewhere.append(element("span", "label", rollouts() ? "other iterations" : "other steps"));
    row.elsewhere.slice(0, 60).forEach((e) => elsewhere.append(chip(`${e.step}: ${e.correct}/${e.rows}`, "", e.group === row.group,
      `${rollouts() ? "iteration" : "step"} ${e.step}: ${e.correct} of ${e.rows} correct`, { n: e.n })));
    $("links").append(elsewhere);
  }

  const problem = [element("span", "", row.problem || row.prompt || row.problem_id)];
  if (row.prompt && row.prompt.trim() !== (row.problem || "").trim()) {
    const details = element("details"), text = element("span", "prompt", row.prompt);
    details.append(element("summary", "", "prompt as the policy reads it"), text);
    problem.push(details);
  }
  $("problem").replaceChildren(...problem);

  Object.entries(MODES).forEach(([name, m]) => { $("colour").querySelector(`[value=${name}]`).disabled = !m.has(t); });
  if (!mode().has(t)) $("colour").value = "region";
  const place = $("tokens");
  place.replaceChildren();
  t.text.forEach((text, i) => {
    const span = element("span", i >= row.off_start && i < row.off_stop ? "seed" : "", text);
    span.dataset.i = i;
    if (text === "\n" || /^[ \t]*\n+$/.test(text)) span.prepend(element("span", "mark", "⏎"));
    place.append(span);
  });
  const facts = [["answer", row.extracted], ["gold", row.gold], ["difficulty", row.difficulty], ["problem", row.problem_id],
    ["policy of step", row.policy_step], ["finish", row.finish_reason], ["temperature", row.temperature === null ? null : number(row.temperature, 3)]];
  const list = element("dl");
  facts.filter((f) => f[1] !== null && f[1] !== undefined).forEach(([name, value]) => {
    const box = element("div");
    box.append(element("dt", "", name), element("dd", "", value));
    list.append(box);
  });
  $("facts").replaceChildren(list);
  paint();
}

function paint() {
  if (!current) return;
  const t = current.tokens, m = mode(), spans = $("tokens").children, name = $("colour").value;
  for (let i = 0; i < spans.length; i++) {
    const seed = i >= current.off_start && i < current.off_stop;
    if (name === "region") spans[i].style.background = seed ? "var(--seed)" : "var(--cont)";
    else {
      const v = m.value(t, i);
      spans[i].style.background = v === null || v === undefined ? "transparent" : colourOf(m.shade(v));
    }
  }
  legend();
  track();
}

function legend() {
  const place = $("legend"), name = $("colour").value;
  place.replaceChildren();
  const bars = element("span", "dim bars", `bars: ${name === "region" ? "−log-prob (nats)" : mode().name}${mode().unit ? ` (${mode().unit})` : ""}`);
  place.append(bars);
  const key = (background, text, edge) => {
    const box = element("span"), swatch = element("span", "key");
    swatch.style.background = background;
    if (edge) swatch.style.borderBottom = "2px solid var(--seed-edge)";
    box.append(swatch, text);
    place.append(box);
  };
  if (name === "region") {
    if (current.off_stop > current.off_start) key("var(--seed)", `seed: snapshot of step ${current.snapshot_step}`, true);
    key("var(--cont)", `continuation: policy of step ${current.policy_step}`);
    return;
  }
  const box = element("span"), ramp = element("span", "ramp"), ends = mode().ends;
  const stops = ends.length === 3 ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1];
  ramp.style.background = `linear-gradient(to right, ${stops.map(colourOf).join(", ")})`;
  box.append(ends[0], ramp, ends[ends.length - 1]);
  place.append(box);
  if (current.off_stop > current.off_start) key("transparent", "seed", true);
}

// One bar per token under the same colours: where in the sequence something happens is seen at once.
function track() {
  const canvas = $("track"), t = current.tokens, m = mode(), n = t.text.length, name = $("colour").value;
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = 52;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), css = getComputedStyle(document.documentElement);
  pen.scale(scale, scale);
  const values = t.text.map((_, i) => (name === "region" ? -t.behaviour[i] : m.value(t, i)));
  const held = values.filter((v) => v !== null && Number.isFinite(v));
  const two = m.ends && m.ends.length === 3;
  const heightOf = (v) => (two ? Math.abs(m.shade(v)) : v / Math.max(1e-9, ...held.map(Math.abs)));
  const step = width / n;
  values.forEach((v, i) => {
    const seed = i >= current.off_start && i < current.off_stop;
    pen.fillStyle = css.getPropertyValue(seed ? "--seed-edge" : "--cont-edge");
    if (v !== null && Number.isFinite(v)) {
      const tall = Math.max(1, Math.abs(heightOf(v)) * (two ? 22 : 44));
      const top = two ? (m.shade(v) < 0 ? 24 : 24 - tall) : 46 - tall;
      pen.fillRect(i * step, top, Math.max(0.6, step - (step > 4 ? 1 : 0)), tall);
    }
    pen.fillRect(i * step, 49, step + 0.5, 3);
  });
  canvas.title = name === "region" ? "−log-prob per token (nats), left to right" : `${m.name} per token, left to right`;
}

function tip(i, x, y) {
  const t = current.tokens, seed = i >= current.off_start && i < current.off_stop, place = $("tip");
  const written = seed ? `seed, by the snapshot of step ${current.snapshot_step}` : `continuation, by the policy of step ${current.policy_step}`;
  const lines = [["token", `${i + 1} of ${t.text.length}, id ${t.id[i]}`], ["written as", written],
    ["log-prob (behaviour)", `${number(t.behaviour[i])}  (p ${number(Math.exp(t.behaviour[i]), 3)})`]];
  if (t.logprob_old) lines.push(["log-prob (π old)", number(t.logprob_old[i])]);
  if (t.logprob) lines.push(["log-prob (π θ)", number(t.logprob[i])]);
  if (t.ratio) lines.push(["ratio", number(t.ratio[i])], ["weight", number(t.weight[i])]);
  if (t.entropy) lines.push(["entropy", `${number(t.entropy[i])} nats`]);
  if (t.advantage) lines.push(["advantage", number(t.advantage[i])]);
  if (t.clipped) lines.push(["gradient", t.clipped[i] ? "clipped away" : t.used[i] ? (t.advantage[i] ? "kept" : "none, A = 0") : "not in the loss"]);
  const table = element("table");
  lines.forEach(([name, value]) => {
    const tr = table.insertRow();
    tr.append(element("td", "", name), element("td", "", value));
  });
  place.replaceChildren(element("div", "piece", JSON.stringify(t.text[i])), table);
  place.hidden = false;
  const box = place.getBoundingClientRect();
  place.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  place.style.top = `${y + 22 + box.height > innerHeight ? Math.max(6, y - box.height - 14) : y + 22}px`;
  document.querySelectorAll("#tokens .at").forEach((s) => s.classList.remove("at"));
  $("tokens").children[i].classList.add("at");
}
function hideTip() {
  $("tip").hidden = true;
  document.querySelectorAll("#tokens .at").forEach((s) => s.classList.remove("at"));
}

function listen() {
  let timer;
  $("filters").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { offset = 0; refresh().catch(fail); }, 150);
  });
  $("filters").addEventListener("reset", () => setTimeout(() => { offset = 0; refresh().catch(fail); }));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("set").addEventListener("change", () => { offset = 0; $("filters").reset(); chooseSet(); });
  $("colour").addEventListener("change", () => { paint(); remember(); });
  $("theme").addEventListener("click", Theme.toggle);
  Theme.onChange(paint);
  window.addEventListener("resize", () => current && track());
  $("prev").addEventListener("click", () => { offset = Math.max(0, offset - PAGE); refresh().catch(fail); });
  $("next").addEventListener("click", () => { offset += PAGE; refresh().catch(fail); });
  $("tokens").addEventListener("mouseover", (event) => {
    const span = event.target.closest("[data-i]");
    if (span) tip(Number(span.dataset.i), event.clientX, event.clientY);
  });
  $("tokens").addEventListener("mouseleave", hideTip);
  const at = (event) => {
    const box = $("track").getBoundingClientRect();
    return Math.max(0, Math.min(current.tokens.text.length - 1, Math.floor(((event.clientX - box.left) / box.width) * current.tokens.text.length)));
  };
  $("track").addEventListener("mousemove", (event) => tip(at(event), event.clientX, event.clientY));
  $("track").addEventListener("mouseleave", hideTip);
  $("track").addEventListener("click", (event) => $("tokens").children[at(event)].scrollIntoView({ block: "center" }));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const move = (items, key, by) => {
      const place = items.findIndex((r) => r.n === current.n) + by;
      if (place >= 0 && place < items.length) open({ n: items[place].n }).catch(fail);
    };
    if (event.key === "j" || event.key === "k") {
      if (!current) { if (listed.length) open({ n: listed[0].n }).catch(fail); } else move(listed, "n", event.key === "j" ? 1 : -1);
    } else if (current && (event.key === "h" || event.key === "l")) move(current.members, "n", event.key === "l" ? 1 : -1);
    else if (current && event.key === "c") {
      const usable = [...$("colour").options].filter((o) => !o.disabled).map((o) => o.value);
      $("colour").value = usable[(usable.indexOf($("colour").value) + 1) % usable.length];
      paint();
      remember();
    }
  });
}

function fail(error) {
  $("count").textContent = `could not read: ${error.message}`;
}

async function start() {
  about = await source.about();
  $("set").replaceChildren(...about.sets.map((s) => {
    const option = element("option", "", `${s.label} (${s.rows.toLocaleString("en")})`);
    option.value = s.id;
    return option;
  }));
  $("colour").replaceChildren(...Object.entries(MODES).map(([name, m]) => {
    const option = element("option", "", m.name);
    option.value = name;
    return option;
  }));
  if (boot.mode === "server") $("q").placeholder = "find in problem, response, ids";
  const state = new URLSearchParams(location.hash.slice(1));
  if (state.get("set") && about.sets.some((s) => s.id === state.get("set"))) $("set").value = state.get("set");
  chooseSet();
  FILTERS.forEach((name) => { if (state.get(name)) $(name).value = state.get(name); });
  if (MODES[state.get("colour")]) $("colour").value = state.get("colour");
  offset = Number(state.get("offset") || 0);
  listen();
  await refresh();
  const row = state.get("row");
  if (row) await open({ row_id: row }).catch(fail);
  else if (listed.length) await open({ n: listed[0].n });
  document.body.dataset.ready = "yes";
}
start().catch(fail);
