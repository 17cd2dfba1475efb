// The tree on the page: frame it, zoom, move, pick a node. Works on the `state` of page.js.

const view = { scale: 1, x: 0, y: 0 };

function showTree(tree) {
  state.size = layOut(tree.nodes, (label) => Math.ceil(pen.measureText(label).width));
  const picture = drawTree(tree.nodes);
  byId("tree").replaceChildren(picture);
  byId("tree").setAttribute("aria-label", `Draft tree of ${plural(tree.size - 1, "node", "nodes")}, ${tree.path.length - 1} accepted`);
  frame();
  pickNode(null);
}

/** The whole tree if that stays readable, else its top left, where the target's own words are. */
function frame(everything = false) {
  const { width, height } = state.box, margin = 10;
  const fits = Math.min((width - 2 * margin) / state.size.width, (height - 2 * margin) / state.size.height, 1);
  if (everything || fits >= 0.8) return moveTo(fits, margin, margin);
  const said = state.tree.nodes.at(-1).kind === "bonus" ? state.tree.nodes.at(-1) : state.tree.nodes[state.tree.path.at(-1)];
  const scale = Math.min(1, Math.max(0.85, (width - 2 * margin) / (said.x + said.width)));
  moveTo(scale, Math.min(margin, width - margin - (said.x + said.width) * scale), margin);
}

function moveTo(scale, x, y) {
  Object.assign(view, { scale, x, y });
  byId("tree").firstChild.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${scale.toFixed(3)})`);
}

function zoom(factor, x = state.box.width / 2, y = state.box.height / 2) {
  const scale = Math.max(0.08, Math.min(view.scale * factor, 3)), change = scale / view.scale;
  moveTo(scale, x - (x - view.x) * change, y - (y - view.y) * change);
}

function pickNode(node) {
  for (const old of byId("tree").querySelectorAll(".chosen")) old.classList.remove("chosen");
  state.node = node;
  if (!node) return byId("node").replaceChildren("Point at a node for its probability; drag to move, Ctrl + wheel to zoom.");
  byId("tree").querySelector(`[data-node="${node.index}"]`).classList.add("chosen");
  byId("node").replaceChildren(...describeNode(state.tree, node));
}

function stepNode(by) {
  const { nodes } = state.tree, at = state.node ? state.node.index + by : 0;
  const node = nodes[Math.max(0, Math.min(at, nodes.length - 1))], { width, height } = state.box;
  pickNode(node);
  const x = view.x + node.x * view.scale, y = view.y + node.y * view.scale;
  const inside = x > 0 && y > 0 && x + node.width * view.scale < width && y + HEIGHT * view.scale < height;
  if (!inside) moveTo(view.scale, view.x + width / 2 - x, view.y + height / 2 - y);
}

function listenToTree(box) {
  const nodeOf = (event) => {
    const group = event.target.closest?.("[data-node]");
    return group ? state.tree.nodes[Number(group.dataset.node)] : null;
  };
  let drag = null;
  box.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX - view.x, y: event.clientY - view.y, node: nodeOf(event) };
    if (drag.node) pickNode(drag.node);
    box.setPointerCapture(event.pointerId);
    box.classList.add("dragging");
  });
  box.addEventListener("pointermove", (event) => {
    if (drag) moveTo(view.scale, event.clientX - drag.x, event.clientY - drag.y);
    else if (event.pointerType === "mouse" && nodeOf(event)) pickNode(nodeOf(event));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    box.addEventListener(end, () => { drag = null; box.classList.remove("dragging"); });
  }
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) {
      if (event.deltaX) { event.preventDefault(); moveTo(view.scale, view.x - event.deltaX, view.y); }
      return;
    }
    event.preventDefault();
    const corner = box.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 300), event.clientX - corner.left, event.clientY - corner.top);
  }, { passive: false });
}
