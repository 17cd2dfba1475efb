// The page: which sequence and cycle are shown, and what keys and the pointer do.

const data = JSON.parse(byId("overview-data").textContent);
const treeLines = byId("tree-data").textContent.split("\n");
const pen = document.createElement("canvas").getContext("2d");
const state = {
  sequence: null, at: 0, tree: null, // what is shown; `at` is a cycle of the sequence
  size: null, box: null, phiWidth: 0, waiting: 0, // of the pictures
  node: null, match: -1, numMatches: 0,
};
const pane = new TextPane(byId("text"), select);
const overview = new Overview(byId("overview"), select);

function showSequence(index) {
  const sequence = (state.sequence = data.sequences[index]);
  const { stats } = sequence, prompt = byId("prompt");
  fillStats(byId("run-stats"), runFacts(stats));
  prompt.hidden = !sequence.prompt;
  prompt.querySelector("summary").textContent = `Prompt, ${plural(sequence.prompt_len, "token", "tokens")}`;
  prompt.querySelector("pre").textContent = sequence.prompt;
  pane.show(sequence.cycles);
  overview.show(sequence.cycles);
  search(byId("query").value, false);
  select(0);
}

function runFacts(stats) {
  const facts = [
    ["τ, tokens per cycle", number(stats.acceptance_length), "acceptance length: tokens committed per cycle, bonus included"],
    ["tokens", whole(stats.num_tokens)],
    ["cycles", whole(stats.num_cycles)],
    ["tokens/s", number(stats.tokens_per_s, 1), "while decoding; passes are shared by all sequences of the batch"],
    ["mean budget", number(stats.mean_budget, 1), "drafted nodes verified per cycle"],
    ["accepted / expected Φ", `${whole(stats.num_accepted)} / ${number(stats.phi, 0)}`, "accepted nodes in all, and how many the drafter's probabilities promised"],
    ["decoding", duration(stats.decode_s)],
    ["prefill", duration(stats.prefill_s)],
  ];
  if (data.sequences.length > 1) {
    const { total } = data;
    facts.push([`all ${data.sequences.length} sequences`, `τ ${number(total.acceptance_length)}, ${number(total.tokens_per_s, 1)} tokens/s`]);
  }
  return facts;
}

/** Show cycle `at` of the current sequence. */
function select(at) {
  const { cycles, stats } = state.sequence, count = cycles.committed.length;
  state.at = Math.max(0, Math.min(at, count - 1));
  at = state.at;
  pane.select(at);
  const tree = (state.tree = readTree(treeLines[cycles.tree[at]], data.vocabulary, cycles.committed[at]));
  byId("cycle-title").textContent = `Cycle ${whole(at + 1)} of ${whole(count)}`;
  byId("previous").disabled = at === 0;
  byId("next").disabled = at === count - 1;
  const seconds = cycles.seconds[at], total = seconds.reduce((sum, value) => sum + value, 0);
  fillStats(byId("cycle-stats"), [
    ["committed", whole(cycles.committed[at])],
    ["accepted", `${cycles.accepted[at]} of ${cycles.budget[at]}`, "drafted nodes on the target's path, of the budget"],
    ["budget by", cycles.why[at] || "–", "what decided the budget, in the policy's words"],
    ["expected Φ", number(cycles.phi[at])],
    ["depth", String(Math.max(...tree.nodes.slice(0, tree.size).map((node) => node.depth))), "deepest drafted node"],
    ["position", whole(cycles.start[at]), "of the anchor"],
    ["pass", duration(total)],
  ]);
  showOutcome(tree, cycles, at);
  overview.select(at);
  // Pictures once a frame, so that a key held down skips some instead of lagging behind.
  if (!state.waiting) state.waiting = requestAnimationFrame(drawCycle);
}

function drawCycle() {
  const { sequence: { cycles, stats }, at, tree } = state;
  state.waiting = 0;
  showTree(tree);
  drawPhi(byId("phi"), tree.phi, cycles.budget[at], cycles.accepted[at], state.phiWidth);
  const all = stats.stages.reduce((sum, value) => sum + value, 0) || 1;
  drawSeconds(byId("seconds"), cycles.seconds[at], cycles.predicted[at], stats.stages.map((value) => value / all));
}

/** Sizes and fonts, read only when they may have changed: reading them makes the browser lay out. */
function measure() {
  state.box = { width: byId("tree").clientWidth, height: byId("tree").clientHeight };
  state.phiWidth = Math.max(byId("phi").clientWidth, 240);
  pen.font = `12px ${style("--mono")}`;
}

function showOutcome(tree, cycles, at) {
  const words = tree.path.slice(1).map((index) => tree.nodes[index]);
  if (tree.nodes.length > tree.size) words.push(tree.nodes[tree.size]);
  const chips = words.map((node) => html("b", { class: `${node.kind === "bonus" ? "bonus" : ""}${node.cut ? " cut" : ""}`,
    title: node.cut ? "cut off by a stop or limit" : node.kind }, node.text === null ? `#${node.id}` : visible(node.text)));
  const none = !cycles.drafted[at] ? "plain cycle" : tree.phi.length > 1 ? "drafted, none verified" : "nothing to draft";
  const lead = `${tree.size > 1 ? "" : `${none}; `}the target said`;
  const error = cycles.error[at];
  byId("outcome").replaceChildren(html("small", {}, lead), ...chips, error ? html("span", { class: "error" }, `error: ${error}`) : "");
}

// ---- search ---------------------------------------------------------------------------------

function search(query, go = true) {
  state.numMatches = pane.search(query);
  state.match = -1;
  if (go && state.numMatches) return nextMatch(1);
  sayMatch(query);
}

function nextMatch(by) {
  if (!state.numMatches) return;
  state.match = state.match < 0 ? 0 : (state.match + by + state.numMatches) % state.numMatches;
  select(pane.current(state.match));
  sayMatch(byId("query").value);
}

function sayMatch(query) {
  const at = state.match < 0 ? "" : `${whole(state.match + 1)} of `;
  byId("found").textContent = !query ? "" : state.numMatches ? at + whole(state.numMatches) : "not found";
}

// ---- keys, buttons, start -------------------------------------------------------------------

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const query = byId("query");
  if (event.target === query) {
    if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") { query.value = ""; search(""); byId("text").focus(); }
    else return;
    return event.preventDefault();
  }
  if (event.target instanceof HTMLSelectElement) return;
  const last = state.sequence.cycles.committed.length - 1;
  const actions = {
    ArrowLeft: () => select(state.at - 1), ArrowRight: () => select(state.at + 1),
    PageUp: () => select(state.at - 10), PageDown: () => select(state.at + 10),
    Home: () => select(0), End: () => select(last),
    "/": () => { query.focus(); query.select(); },
    Escape: () => { query.value = ""; search(""); pickNode(null); frame(); },
    "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: () => frame(true),
  };
  if (event.target === byId("tree")) {
    actions.ArrowUp = () => stepNode(-1);
    actions.ArrowDown = () => stepNode(1);
  }
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
}

function showAbout() {
  const facts = Object.entries(data.header).filter(([name, value]) => name !== "kind" && value !== null && value !== "");
  byId("source").textContent = data.name;
  document.title = `${data.name} · draftwood trace`;
  byId("about").querySelector("dl").replaceChildren(...facts.flatMap(([name, value]) => [
    html("dt", {}, name), html("dd", {}, typeof value === "string" ? value : JSON.stringify(value))]));
  byId("notice").hidden = !data.cut_short;
  byId("notice").textContent = "The trace ends in the middle of a line: its last cycle was not written whole and is not shown.";
}

function start() {
  showAbout();
  const choice = byId("sequence");
  choice.append(...data.sequences.map((sequence, index) =>
    html("option", { value: index }, `${sequence.id}: ${shortened(visible(sequence.cycles.pieces.flat().join("").trim()).replaceAll("·", " "), 36)}`)));
  byId("sequence-choice").hidden = data.sequences.length < 2;
  choice.addEventListener("change", () => showSequence(Number(choice.value)));
  byId("query").addEventListener("input", (event) => search(event.target.value));
  const buttons = {
    previous: () => select(state.at - 1), next: () => select(state.at + 1),
    "zoom-in": () => zoom(1.25), "zoom-out": () => zoom(0.8), "zoom-fit": () => frame(true),
  };
  for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener("click", action);
  listenToTree(byId("tree"));
  document.addEventListener("keydown", onKey);
  const redraw = () => { measure(); overview.measure(); select(state.at); };
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => {
    frame(true);
    byId("tree").setAttribute("viewBox", `0 0 ${state.box.width} ${state.box.height}`);
  });
  window.addEventListener("afterprint", () => byId("tree").removeAttribute("viewBox"));
  measure();
  showSequence(0);
}

start();
