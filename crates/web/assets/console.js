// A VM's console or screen in its page. The terminal (xterm.js) and the viewer (noVNC) are loaded when such a page is opened. Both take
// all keys; Shift+F6 leaves them. The connection is made again when it was lost; whoever may not have it, is told why.
const main = document.getElementById("main");
const place = document.getElementById("machine");
const said = document.getElementById("machine-status");
const enter = document.getElementById("machine-enter");
const again = document.getElementById("machine-again");
const reset = document.getElementById("machine-reset");

const PAUSE_MS = 2000;
const PAUSE_MS_MAX = 60000;
const TRIES_MAX = 10;
const STABLE_MS = 5000;
const ANSWER_MS = 30000;
// The second one is that of a WebSocket that only says why there is none.
const PROTOCOLS = ["binary", "perigee-refused"];
// The controller takes messages of 64 KiB.
const PIECE = 16384;
// As RFC 6455 and the controller have them.
const POLICY = 1008;
const UNSUPPORTED = 1003;

// What a guest prints leads nowhere.
const NO_LINKS = { activate: () => {} };

const say = (text) => {
  if (said.textContent !== text) said.textContent = text;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colours = matchMedia("(prefers-color-scheme: dark)");

// The pages' security policy takes no styles that stand in the document. Those of the terminal go another way, which it leaves to scripts.
const withoutInlineStyles = () => {
  const create = document.createElement.bind(document);
  const styleSheet = () => {
    const element = create("span");
    const sheet = new CSSStyleSheet();
    document.adoptedStyleSheets.push(sheet);
    element.hidden = true;
    Object.defineProperty(element, "textContent", { set: (text) => sheet.replaceSync(text) });
    return element;
  };
  document.createElement = (tag, options) => {
    if (tag === "style") return styleSheet();
    const element = create(tag, options);
    const set = element.setAttribute.bind(element);
    element.setAttribute = (name, value) => {
      if (name === "style") element.style.cssText = value;
      else set(name, value);
    };
    return element;
  };
};

const aConsole = ({ Terminal }) => {
  const theme = () => ({ background: colour("--panel"), foreground: colour("--text"), cursor: colour("--link"), selectionBackground: colour("--allocated") });
  withoutInlineStyles();
  const terminal = new Terminal({ cols: 80, rows: 24, fontSize: 14, minimumContrastRatio: 4.5, scrollback: 5000, screenReaderMode: true, theme: theme(), linkHandler: NO_LINKS });
  terminal.open(place);
  colours.addEventListener("change", () => (terminal.options.theme = theme()));
  let socket = null;
  const send = (bytes) => {
    if (!socket || socket.readyState !== WebSocket.OPEN) return;
    for (let at = 0; at < bytes.length; at += PIECE) socket.send(bytes.subarray(at, at + PIECE));
  };
  terminal.onData((text) => send(new TextEncoder().encode(text)));
  terminal.onBinary((text) => send(Uint8Array.from(text, (one) => one.charCodeAt(0))));
  return {
    attach: (to) => {
      socket = to;
      socket.addEventListener("message", (event) => terminal.write(new Uint8Array(event.data)));
    },
    leave: () => (socket = null),
    focus: () => terminal.focus(),
  };
};

const aScreen = ({ default: RFB }) => {
  let viewer = null;
  reset.addEventListener("click", () => viewer && viewer.sendCtrlAltDel());
  return {
    attach: (socket) => {
      place.replaceChildren();
      viewer = new RFB(place, socket);
      viewer.scaleViewport = true;
      viewer.background = colour("--panel");
      reset.hidden = false;
    },
    leave: () => {
      viewer = null;
      reset.hidden = true;
    },
    focus: () => viewer && viewer.focus(),
  };
};

let machine = null;
let timer = 0;
let tries = 0;
// It waits until somebody sees the page.
let isDue = false;

const later = () => {
  tries += 1;
  again.hidden = false;
  if (tries > TRIES_MAX) return false;
  timer = setTimeout(connect, Math.min(PAUSE_MS * 2 ** (tries - 1), PAUSE_MS_MAX));
  return true;
};

// A browser does not say why a WebSocket was refused. The token may be over.
const askWhy = async () => {
  try {
    const answer = await fetch(location.href, { method: "HEAD", signal: AbortSignal.timeout(ANSWER_MS) });
    if (answer.redirected) location.assign(answer.url);
    return "It can't be reached now.";
  } catch {
    return "The connection to the controller is lost.";
  }
};

const closed = async (event, isAttached) => {
  machine.leave();
  enter.hidden = true;
  if (event.code === POLICY) {
    location.reload();
    return;
  }
  const why = event.reason ? `${event.reason}.` : await askWhy();
  if (event.code === UNSUPPORTED) {
    again.hidden = false;
    say(why);
    return;
  }
  if (isAttached) tries = 0;
  say(later() ? `${why} Trying again …` : why);
};

const connect = () => {
  clearTimeout(timer);
  isDue = document.hidden;
  if (isDue) return;
  again.hidden = true;
  const address = new URL(place.dataset.socket, location.href);
  address.protocol = address.protocol.replace("http", "ws");
  const socket = new WebSocket(address, PROTOCOLS);
  socket.binaryType = "arraybuffer";
  let opened = 0;
  socket.addEventListener("open", () => {
    if (socket.protocol !== PROTOCOLS[0]) return;
    opened = performance.now();
    machine.attach(socket);
    enter.hidden = false;
    say("Attached. Shift+F6 leaves it, for the keys of the browser.");
    if ([document.body, main, again].includes(document.activeElement)) machine.focus();
  });
  socket.addEventListener("close", (event) => closed(event, opened && performance.now() - opened > STABLE_MS));
};

const begin = async () => {
  const library = await import(place.dataset.library);
  machine = place.dataset.kind === "console" ? aConsole(library) : aScreen(library);
  place.addEventListener(
    "keydown",
    (event) => {
      if (event.key !== "F6" || !event.shiftKey) return;
      event.preventDefault();
      event.stopPropagation();
      (enter.hidden ? again : enter).focus();
    },
    true,
  );
  enter.addEventListener("click", () => machine.focus());
  again.addEventListener("click", () => {
    tries = 0;
    connect();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && isDue) connect();
  });
  connect();
};

begin().catch((error) => say(`It can't be shown: ${error.message}`));
