// The chat: one conversation, streamed, with its counts. Text is only ever set as text, never as HTML.

const element = (id) => document.getElementById(id);

/** The JSON objects of a stream of server-sent events, as they arrive. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

/** What the fields of the form say, without those that were left empty. */
function settings(form) {
  const body = {};
  for (const field of form.querySelectorAll("input[type=number]")) {
    if (field.value !== "") body[field.name] = Number(field.value);
  }
  body.chat_template_kwargs = { thinking: form.elements.thinking.checked };
  return body;
}

function makeTurn(role, text) {
  const turn = document.createElement("article");
  turn.className = role;
  const name = document.createElement("h2");
  name.textContent = role === "user" ? "You" : "Model";
  const content = document.createElement("div");
  content.className = "text";
  content.textContent = text;
  turn.append(name, content);
  element("messages").append(turn);
  turn.scrollIntoView({ block: "end" });
  return { turn, content };
}

/** One answer on the page: thoughts folded above the text, counts below it. */
class AnswerView {
  constructor() {
    Object.assign(this, makeTurn("assistant", ""));
    this.thoughts = document.createElement("details");
    this.thoughts.className = "thoughts";
    this.thoughts.hidden = true;
    const summary = document.createElement("summary");
    summary.textContent = "Thoughts";
    this.thinking = document.createElement("div");
    this.thinking.className = "text";
    this.thoughts.append(summary, this.thinking);
    this.counts = document.createElement("p");
    this.counts.className = "counts";
    this.content.before(this.thoughts);
    this.turn.append(this.counts);
    // Screen readers are told of the answer once it is whole, not of every token.
    this.turn.setAttribute("aria-busy", "true");
  }

  add(delta) {
    const log = element("messages");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (delta.reasoning_content) {
      this.thoughts.hidden = false;
      this.thinking.append(delta.reasoning_content);
    }
    if (delta.content) this.content.append(delta.content);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  count(usage, seconds, reason) {
    const details = usage.completion_tokens_details;
    const drafts = details.accepted_prediction_tokens + details.rejected_prediction_tokens;
    const parts = [
      `${usage.prompt_tokens} + ${usage.completion_tokens} tokens`,
      `${usage.prompt_cache_hit_tokens} from the cache`,
      `${(usage.completion_tokens / Math.max(seconds, 0.001)).toFixed(1)} tokens/s`,
    ];
    if (drafts) {
      const share = details.accepted_prediction_tokens / drafts;
      parts.push(`${Math.round(100 * share)} % of ${drafts} drafts accepted`);
    }
    if (reason && reason !== "stop") parts.push(`ended by ${reason}`);
    this.counts.textContent = parts.join(" · ");
  }

  fail(message) {
    const line = document.createElement("p");
    line.className = "error";
    line.setAttribute("role", "alert");
    line.textContent = message;
    this.turn.append(line);
  }
}

class Chat {
  constructor(ask) {
    this.ask = ask;
    this.messages = [];
    this.stopping = null;
  }

  async send(text) {
    const form = element("ask");
    this.messages.push({ role: "user", content: text });
    makeTurn("user", text);
    const view = new AnswerView();
    const system = form.elements.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    const body = {
      messages, stream: true, ...settings(form),
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    this.stopping = new AbortController();
    this.setBusy(true);
    try {
      await this.stream(body, view, this.stopping.signal);
      element("status").textContent = "Answered.";
    } catch (error) {
      if (error.name === "AbortError") element("status").textContent = "Stopped.";
      else { view.fail(error.message); element("status").textContent = "Failed."; }
    }
    // A turn without an answer would make the next request one the template refuses.
    const answer = view.content.textContent;
    if (answer) this.messages.push({ role: "assistant", content: answer });
    else this.messages.pop();
    view.turn.setAttribute("aria-busy", "false");
    this.setBusy(false);
  }

  async stream(body, view, signal) {
    const response = await this.ask("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body), signal,
    });
    if (!response.ok) {
      const text = await response.text();
      let message = text;
      try { message = JSON.parse(text).error.message; } catch { /* a proxy's page, shown as it is */ }
      throw new Error(message || `HTTP ${response.status}`);
    }
    let first = null, reason = null;
    for await (const chunk of readEvents(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (choice) {
        view.add(choice.delta);
        reason = choice.finish_reason ?? reason;
      }
      if (chunk.usage?.completion_tokens) {
        first ??= performance.now();
        view.count(chunk.usage, (performance.now() - first) / 1000, reason);
      }
    }
  }

  setBusy(isBusy) {
    element("send").disabled = element("clear").disabled = isBusy;
    element("stop").disabled = !isBusy;
    if (isBusy) element("status").textContent = "Answering…";
    else element("prompt").focus();
  }

  clear() {
    this.messages = [];
    element("messages").replaceChildren();
    element("status").textContent = "A new chat.";
    element("prompt").focus();
  }
}

export function startChat(ask) {
  const chat = new Chat(ask);
  const form = element("ask"), prompt = element("prompt");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || !element("stop").disabled) return;
    prompt.value = "";
    document.querySelector("#messages .hint")?.remove();
    chat.send(text);
  });
  // A wrong field inside a closed fold could not be pointed at, and nothing would happen.
  form.addEventListener("invalid", ({ target }) => {
    const fold = target.closest("details");
    if (fold) fold.open = true;
  }, true);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.stopping?.abort();
  });
  element("stop").addEventListener("click", () => chat.stopping?.abort());
  element("clear").addEventListener("click", () => chat.clear());
}
