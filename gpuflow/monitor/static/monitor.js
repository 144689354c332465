// Keeps a page up to date: asks every two seconds for the rows that have changed, puts them in place, turns times into
// ages, and sends the actions of buttons. The server renders and escapes every row; nothing is built from text here.

const settings = document.querySelector("meta[name=monitor]").dataset;
const live = document.getElementById("live");
const said = document.getElementById("said");
// The page's own address may hold a login (http://user:password@host/), with which fetch takes no address.
const here = (path) => new URL(path, window.location.origin);
const PERIOD_MS = 2000;
const SLOWEST_MS = 30000;

let version = settings.version;
let wait = PERIOD_MS;
let timer = 0;
let asking = null;
let ahead = 0; // this clock less the server's, in ms

function element(html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  return template.content.firstElementChild;
}

// The focus stays on the button of the same action when its row is replaced.
function replaced(before, after) {
  const focus = document.activeElement;
  const within = focus && before.contains(focus) ? focus : null;
  before.replaceWith(after);
  if (within) {
    const action = within.dataset.action;
    const same = action && after.querySelector(`[data-action="${CSS.escape(action)}"]`);
    const next = same || after.querySelector(action ? "button" : "a, button") || after.querySelector("a");
    if (next) next.focus({ preventScroll: true });
  }
}

function apply(name, change) {
  const container = document.getElementById(name);
  if (!container) return;
  const known = new Map([...container.children].map((child) => [child.dataset.key ?? name, child]));
  for (const [key, html] of Object.entries(change.rows)) {
    const fresh = element(html);
    if (!fresh) continue;
    const before = known.get(key);
    if (before) replaced(before, fresh);
    known.set(key, fresh);
  }
  if (!change.order) return;
  const wanted = new Set(change.order);
  for (const [key, child] of known) if (!wanted.has(key)) child.remove();
  let place = container.firstElementChild;
  for (const key of change.order) {
    const child = known.get(key);
    if (!child) continue;
    if (child === place) place = place.nextElementSibling;
    else container.insertBefore(child, place);
  }
}

function ages() {
  const now = Date.now() - ahead;
  for (const time of document.querySelectorAll("time[data-age]")) {
    const text = span((now - Date.parse(time.dateTime)) / 1000);
    if (time.textContent !== text) {
      if (!time.title) time.title = new Date(time.dateTime).toLocaleString();
      time.textContent = text;
    }
  }
  for (const time of document.querySelectorAll("time[data-local]:not([title])")) {
    time.title = time.dateTime;
    time.textContent = new Date(time.dateTime).toLocaleTimeString();
  }
}

function span(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min ago`;
  return `${Math.floor(seconds / 86400)} days ago`;
}

function say(state, text) {
  document.body.dataset.live = state;
  if (live.textContent !== text) live.textContent = text;
}

async function update() {
  clearTimeout(timer);
  if (document.hidden) return say("paused", "paused while hidden");
  if (asking) return;
  asking = new AbortController();
  const limit = setTimeout(() => asking?.abort(), SLOWEST_MS);
  try {
    const answer = await fetch(here(`${settings.updates}?since=${encodeURIComponent(version)}`), { signal: asking.signal });
    if (!answer.ok) {
      const problem = await answer.json().catch(() => ({}));
      throw new Error(problem.error || `the server answers ${answer.status}`);
    }
    const date = Date.parse(answer.headers.get("Date"));
    if (!Number.isNaN(date)) ahead = Date.now() - date;
    const found = await answer.json();
    for (const [name, change] of Object.entries(found.containers)) apply(name, change);
    version = found.version;
    wait = PERIOD_MS;
    say("live", "live");
  } catch (error) {
    wait = Math.min(wait * 2, SLOWEST_MS);
    say("stale", `not up to date: ${error.name === "Error" ? error.message : "Flower does not answer"}`);
  } finally {
    clearTimeout(limit);
    asking = null;
    ages();
    if (!document.hidden) timer = setTimeout(update, wait);
  }
}

async function act(button) {
  if (button.dataset.busy) return;
  const question = button.dataset.confirm;
  if (question && !window.confirm(question)) return;
  const { action, target } = button.dataset;
  button.dataset.busy = "yes"; // not disabled: that would take the focus away
  said.hidden = false;
  try {
    const answer = await fetch(here(settings.action), {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-XSRFToken": settings.token },
      body: JSON.stringify({ action, target }),
    });
    const found = await answer.json();
    said.textContent = found.message || found.error;
    said.dataset.failed = answer.ok ? "" : "yes";
  } catch {
    said.textContent = "Flower does not answer; nothing is known of this action.";
    said.dataset.failed = "yes";
  } finally {
    delete button.dataset.busy;
    update();
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) act(button);
});
document.addEventListener("visibilitychange", update);
setInterval(ages, 1000);
ages();
timer = setTimeout(update, PERIOD_MS);
