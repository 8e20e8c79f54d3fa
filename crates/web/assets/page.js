"use strict";
// Keeps the open page fresh: the controller says that what the page shows has changed (server-sent events), and the page's
// main part is fetched anew and put in place of the old one. The lines of a job's log come with the same events, because a browser has
// few connections. Without this script a page is read, and read anew, as usual.
(() => {
  const LOST = "The connection to the controller is lost. Trying again …";
  const NOT_LIVE = "This page is not kept fresh at the moment. Trying again …";
  const AGAIN_MS = 5000;
  const AGAIN_MS_MAX = 60000;
  const ANSWER_MS = 30000;
  const LOG_LINES_MAX = 2000;

  const banner = document.getElementById("connection");
  const main = document.getElementById("main");
  const say = (text) => {
    if (banner.textContent !== text) banner.textContent = text;
  };

  // What a person is about to do with the old content is not taken away.
  const isInUse = () => {
    const active = document.activeElement;
    if (active && main.contains(active) && active.matches("input, select, textarea")) return true;
    const selection = document.getSelection();
    return Boolean(selection && !selection.isCollapsed && main.contains(selection.anchorNode));
  };

  // Finds the same element in the new content: by its id, or as the so-and-so-many-th with its name and address.
  const keyOf = (element) => {
    if (element.id) return { id: element.id };
    const same = [...main.querySelectorAll(element.tagName)].filter((other) => other.getAttribute("href") === element.getAttribute("href"));
    return { tag: element.tagName, href: element.getAttribute("href"), at: same.indexOf(element) };
  };
  const findBy = (key) => {
    if (key.id) return document.getElementById(key.id);
    const same = [...main.querySelectorAll(key.tag)].filter((other) => other.getAttribute("href") === key.href);
    return same[key.at] || same[0];
  };

  const swap = (fresh) => {
    const active = document.activeElement;
    const focused = active && active !== main && main.contains(active) ? keyOf(active) : null;
    const scrolled = [...main.querySelectorAll(".scroll")].map((box) => [box.getAttribute("aria-labelledby"), box.scrollLeft]);
    const log = main.querySelector(".log");
    const [top, logTop] = [window.scrollY, log ? log.scrollTop : 0];
    for (const kept of main.querySelectorAll("[data-keep]")) {
      const place = fresh.querySelector(`[data-keep="${kept.dataset.keep}"]`);
      if (place) place.replaceWith(kept);
    }
    main.replaceChildren(...fresh.childNodes);
    main.dataset.state = fresh.dataset.state || "";
    for (const [name, left] of scrolled) {
      const box = main.querySelector(`.scroll[aria-labelledby="${name}"]`);
      if (box) box.scrollLeft = left;
    }
    if (log && main.contains(log)) log.scrollTop = logTop;
    const again = focused && findBy(focused);
    if (again) again.focus({ preventScroll: true });
    window.scrollTo(window.scrollX, top);
  };

  let isBusy = false;
  const refresh = async (state) => {
    if (isBusy || isInUse()) return false;
    isBusy = true;
    try {
      const headers = { accept: "text/html", "perigee-state": state };
      // The log is here already, and has lines of its own.
      if (main.querySelector("[data-keep=log]")) headers["perigee-without-log"] = "1";
      const answer = await fetch(location.href, { headers, signal: AbortSignal.timeout(ANSWER_MS) });
      if (answer.redirected && new URL(answer.url).pathname === "/login") {
        // The token is over.
        location.assign(answer.url);
        return false;
      }
      const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = parsed.getElementById("main");
      if (!fresh) return false;
      swap(document.adoptNode(fresh));
      return answer.ok;
    } catch {
      return false;
    } finally {
      isBusy = false;
    }
  };

  // The log has lines of its own, which are added at its end.
  const logPart = () => main.querySelector("[data-log]");
  const add = (line) => {
    const part = logPart();
    if (!part) return;
    const box = part.querySelector(".log");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const shown = document.createElement("div");
    shown.textContent = line.text;
    if (line.is_error) shown.className = "err";
    box.append(shown);
    while (box.childElementCount > LOG_LINES_MAX) box.firstElementChild.remove();
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    part.dataset.log = line.next;
  };

  let source = null;
  let timer = 0;
  const address = () => {
    const part = logPart();
    return part ? `${main.dataset.live}&${part.dataset.log}` : main.dataset.live;
  };
  const later = (what, ms) => {
    clearTimeout(timer);
    timer = setTimeout(what, ms);
  };
  const close = () => {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  };
  // After each refusal the pause is twice as long.
  let pause = AGAIN_MS;
  const rest = () => {
    const ms = pause;
    pause = Math.min(2 * pause, AGAIN_MS_MAX);
    return ms;
  };
  // The stream of events does not say why it was refused. The whole page is not asked for here: there may be many like this one.
  const askWhy = async () => {
    try {
      const answer = await fetch(address(), { signal: AbortSignal.timeout(ANSWER_MS) });
      if (answer.body) answer.body.cancel();
      // The token is over: the page sends to where one logs in.
      if (answer.status === 401) location.reload();
      say(NOT_LIVE);
    } catch {
      say(LOST);
    }
  };
  const open = () => {
    close();
    if (!main.dataset.live || document.hidden) return;
    source = new EventSource(address());
    source.addEventListener("open", () => say(""));
    source.addEventListener("line", (event) => add(JSON.parse(event.data)));
    source.addEventListener("end", () => {
      const part = logPart();
      if (part) delete part.dataset.log;
    });
    source.addEventListener("state", async (event) => {
      say("");
      if (event.data === main.dataset.state || (await refresh(event.data))) {
        pause = AGAIN_MS;
      } else if (source) {
        // What is in use now is looked at again a little later.
        later(open, isInUse() ? AGAIN_MS : rest());
      }
    });
    source.addEventListener("error", async () => {
      // A browser goes on by itself after a lost connection, and gives up after an answer that is a refusal.
      if (!source || source.readyState !== EventSource.CLOSED) {
        say(LOST);
        return;
      }
      close();
      later(open, rest());
      await askWhy();
    });
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else open();
  });
  const box = main.querySelector(".log");
  if (box) box.scrollTop = box.scrollHeight;
  open();
})();
