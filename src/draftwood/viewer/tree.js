// The draft tree of one cycle: columns are depths. What the target said is the top row, all else
// hangs below it, the more probable first.

const ROW = 24, HEIGHT = 19, GAP = 30, PAD = 7, LABEL = 18;

/** The stored arrays of a cycle as nodes; the bonus token is one more node, index `size`. */
function readTree(line, vocabulary, numCommitted) {
  const [tokens, parents, logProbs, path, picks, phi] = JSON.parse(line);
  const accepted = new Set(path);
  const nodes = tokens.map((place, index) => ({
    index, parent: parents[index], logProb: logProbs[index],
    id: vocabulary.ids[place], text: vocabulary.texts[place],
    kind: index === 0 ? "anchor" : accepted.has(index) ? "accepted" : accepted.has(parents[index]) ? "rejected" : "unseen",
    cut: false,
  }));
  path.slice(1).forEach((index, at) => { nodes[index].cut = at >= numCommitted; });
  const size = nodes.length;
  if (picks.length === path.length) {
    const place = picks[picks.length - 1];
    nodes.push({
      index: size, parent: path[path.length - 1], logProb: null, id: vocabulary.ids[place],
      text: vocabulary.texts[place], kind: "bonus", cut: picks.length > numCommitted,
    });
  }
  for (const node of nodes) {
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    node.children = [];
    node.label = shortened(node.text === null ? `#${node.id}` : visible(node.text), LABEL);
    if (node.parent >= 0) nodes[node.parent].children.push(node);
  }
  const said = (node) => (node.kind === "accepted" || node.kind === "bonus" ? 0 : 1);
  for (const node of nodes) node.children.sort((a, b) => said(a) - said(b) || a.index - b.index);
  return { nodes, size, path, phi, picks };
}

/**
 * Rows: a first child continues its parent's row, every other subtree goes to the highest row that
 * is free at all of its depths, so that no two trunks share a gap at the same height.
 */
function layOut(nodes, measure) {
  const free = [];
  const spans = subtreeDepths(nodes);
  const place = (node, row) => {
    node.row = row;
    free[node.depth] = row + 1;
    node.children.forEach((child, at) => {
      let top = at === 0 ? row : 0;
      for (let depth = child.depth; depth <= spans[child.index]; depth++) top = Math.max(top, free[depth] ?? 0);
      place(child, top);
    });
  };
  place(nodes[0], 0);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 22, measure(node.label) + 2 * PAD);
  const lefts = [0];
  for (let depth = 1; depth < widths.length; depth++) lefts[depth] = lefts[depth - 1] + widths[depth - 1] + GAP;
  for (const node of nodes) {
    node.x = lefts[node.depth];
    node.y = node.row * ROW;
    node.width = measure(node.label) + 2 * PAD;
  }
  const last = widths.length - 1;
  return { width: lefts[last] + widths[last], height: Math.max(...free) * ROW - (ROW - HEIGHT) };
}

function subtreeDepths(nodes) {
  const deepest = nodes.map((node) => node.depth);
  for (let at = nodes.length - 1; at > 0; at--) {
    const node = nodes.at(at);
    deepest[node.parent] = Math.max(deepest[node.parent], deepest[at]);
  }
  return deepest;
}

function edgeOf(node, parent) {
  const startX = parent.x + parent.width, startY = parent.y + HEIGHT / 2;
  const endY = node.y + HEIGHT / 2, trunk = node.x - GAP / 2;
  if (endY === startY) return `M${startX} ${startY}H${node.x}`;
  const bend = Math.min(7, endY - startY);
  return `M${startX} ${startY}H${trunk - bend}q${bend} 0 ${bend} ${bend}V${endY - bend}q0 ${bend} ${bend} ${bend}H${node.x}`;
}

function drawTree(nodes) {
  const lines = { plain: "", accepted: "", bonus: "" }, boxes = svg("g");
  const order = [...nodes].sort((a, b) => rankOfKind(a) - rankOfKind(b));
  for (const node of order) {
    const classes = `${node.kind}${node.cut ? " cut" : ""}`;
    if (node.parent >= 0) lines[node.kind in lines ? node.kind : "plain"] += edgeOf(node, nodes[node.parent]);
    const chance = node.logProb === null ? 0 : Math.exp(node.logProb);
    const box = { width: node.width, height: HEIGHT, rx: 4 };
    const plain = node.kind === "rejected" || node.kind === "unseen";
    boxes.append(svg("g", {
      class: `node ${classes}${chance > 0.05 ? " likely" : ""}`, "data-node": node.index,
      transform: `translate(${node.x} ${node.y})`,
    }, svg("rect", box), plain ? svg("rect", { ...box, class: "tint", "fill-opacity": (0.2 * Math.sqrt(chance)).toFixed(3) }) : null,
    svg("text", { x: PAD, y: 13.5 }, node.label)));
  }
  return svg("g", {}, ...Object.entries(lines).map(([kind, d]) => svg("path", { class: `edge ${kind}`, d })), boxes);
}

const rankOfKind = (node) => ["unseen", "rejected", "anchor", "accepted", "bonus"].indexOf(node.kind);

/** One line about a node, as document nodes. */
function describeNode(tree, node) {
  const text = node.text === null ? `#${node.id}` : visible(node.text);
  const said = [`token ${node.id}`, `depth ${node.depth}`];
  if (node.kind === "anchor") said.push("anchor, the last committed token");
  if (node.kind === "bonus") said.push(node.cut ? "bonus token, cut off by a stop or limit" : "bonus token, the target's own");
  if (node.logProb !== null && node.index > 0) {
    const own = Math.exp(node.logProb - tree.nodes[node.parent].logProb);
    said.push(`rank ${node.index} of ${tree.size - 1}`, `prefix probability ${probability(Math.exp(node.logProb))}`,
      `${probability(own)} after its parent`);
    said.push({ accepted: "accepted", rejected: "rejected: the target drew another token here", unseen: "not reached" }[node.kind]
      + (node.cut ? ", cut off by a stop or limit" : ""));
  }
  return [html("b", {}, text), ` ${said.join(" · ")}`];
}
