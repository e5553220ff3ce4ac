// The frame of the page: tabs, the API key, and requests that carry it.
import { startChat } from "./chat.js";
import { startEngine } from "./engine.js";

const KEY = "minidsa-key";
const element = (id) => document.getElementById(id);

/** fetch() with the key of this browser tab; asks for one where the server wants it. */
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    element("key-form").hidden = false;
    element("key-note").textContent = key ? "This key was refused." : "This server asks for a key.";
  }
  return response;
}

async function showModel() {
  const response = await ask("v1/models");
  if (!response.ok) return;
  element("key-form").hidden = true;
  element("model").textContent = (await response.json()).data[0].id;
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // No header can carry anything else, and fetch() would fail without a word.
  if (!/^[!-~]+$/.test(element("key").value)) {
    element("key-note").textContent = "A key has letters, digits and signs of ASCII only, no spaces.";
    return;
  }
  sessionStorage.setItem(KEY, element("key").value);
  element("key").value = "";
  showModel();
});

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab) {
  for (const other of tabs) {
    const isChosen = other === tab;
    other.setAttribute("aria-selected", String(isChosen));
    other.tabIndex = isChosen ? 0 : -1;
    element(other.getAttribute("aria-controls")).hidden = !isChosen;
  }
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
});

if (location.hash === "#engine") select(element("engine-tab"));
startEngine(ask);
startChat(ask);
showModel().catch(() => { element("status").textContent = "The server does not answer."; });
