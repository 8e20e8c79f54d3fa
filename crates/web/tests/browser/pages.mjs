// Looks at the pages in a browser: every page in both colours, on a wide screen and on a phone's, by keyboard alone, without
// JavaScript, while the controller is started anew, and as two tenants. scripts/test-pages starts it.
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

import { Cluster, Failure, check, pause, until } from "./cluster.mjs";

const given = (name) => {
  const value = process.env[name];
  if (!value) throw new Failure(`${name} is not set: scripts/test-pages sets it`);
  return value;
};

const [out, home] = [given("OUT"), given("HOME")];
const packages = createRequire(path.join(given("PACKAGES"), "package.json"));
const { chromium } = packages("playwright-core");
const axe = packages("axe-core");

const HOSTS = 20;
const VMS = 500;
// More memory than a host has.
const TOO_MUCH = 300 * 2 ** 30;
const FIRST_PAGE_BYTES_MAX = 100_000;
const WIDE = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844 };
const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
  "--disable-sync",
];

const cluster = new Cluster(path.join(home, "cluster"), given("PERIGEE"), given("HOSTS_PROGRAM"));
let browser;
// What the browser has said that a page should not have made it say.
const complaints = [];

// ---- Contexts and what is done in them ----

// Each has a cookie jar of its own. What the page's security policy forbids is said on the console.
const open = async (options = {}) => {
  const context = await browser.newContext({ baseURL: cluster.url, viewport: WIDE, ...options });
  context.setDefaultTimeout(300_000);
  context.on("console", (message) => {
    // A refusal and a controller that is away are said too.
    const isExpected = /^(Failed to load resource|WebSocket connection to)/.test(message.text());
    if (message.type() === "error" && !isExpected) complaints.push(`${message.page()?.url()}: ${message.text()}`);
  });
  context.on("weberror", (error) => complaints.push(`${error.page()?.url()}: ${error.error()}`));
  return context;
};

// Opens the log-in page as a page would, and logs in by keyboard.
const logIn = async (context, token) => {
  const page = await context.newPage();
  await page.goto("/");
  check(new URL(page.url()).pathname === "/login", `a stranger is at ${page.url()}`);
  await until("the field for the token has the focus", () => page.locator("#token:focus").count());
  await page.keyboard.type(token);
  await page.keyboard.press("Enter");
  await page.waitForURL("/");
  return page;
};

const session = async (token, options) => {
  const context = await open(options);
  return { context, page: await logIn(context, token) };
};

const textOf = (page) => page.locator("main").innerText();
const banner = (page) => page.locator("#connection").innerText();

// What a request of the page itself gets.
const fetched = (page, address) =>
  page.evaluate(async (to) => {
    const answer = await fetch(to);
    return { status: answer.status, text: await answer.text() };
  }, address);

// Without a style of playwright's own, which the page's security policy would refuse.
const picture = (page, name) => page.screenshot({ path: path.join(out, `${name}.png`), caret: "initial" });

// Presses Tab until the element with this text, or with this id, has the focus, which has to be seen.
const tabTo = async (page, wanted) => {
  for (let pressed = 0; pressed < 400; pressed++) {
    const at = await page.evaluate(() => {
      const active = document.activeElement;
      const style = getComputedStyle(active);
      const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
      return { text: active.textContent.trim(), id: active.id, tag: active.tagName, isSeen };
    });
    if (at.tag !== "BODY" && (at.text === wanted || at.id === wanted)) {
      check(at.isSeen, `nobody sees that ${wanted} has the focus at ${page.url()}`);
      return;
    }
    await page.keyboard.press("Tab");
  }
  throw new Failure(`no Tab leads to ${wanted} at ${page.url()}`);
};

// ---- What is tried ----

const step = async (name, act) => {
  const began = Date.now();
  await act();
  console.log(`  ${name}: ${((Date.now() - began) / 1000).toFixed(0)} s`);
};

const tokens = {};

const fill = async () => {
  for (const [of, role] of [["default/root", "admin"], ["acme/ann", "operator"], ["acme/amy", "member"], ["blue/bob", "operator"]]) {
    tokens[of] = await cluster.token(of, role);
  }
  const shared = () => cluster.ask("PUT", "/v1/images/debian/shared", { shared: true }).catch(() => null);
  await until("the hosts' image is known", shared);
  const [ann, bob] = [tokens["acme/ann"].token, tokens["blue/bob"].token];
  await cluster.ask("POST", "/v1/volumes", { name: "tables", source: "empty", size_bytes: 1 << 30 });
  for (const [token, name] of [[ann, "sesame"], [bob, "bluebell"]]) {
    await cluster.submitMany(10, name, { token });
    await cluster.submit(`${name}waits`, { token, memoryBytes: TOO_MUCH });
    await cluster.ask("POST", "/v1/volumes", { name: `${name}data`, source: "empty", size_bytes: 1 << 30 }, token);
  }
  await cluster.submit("talks");
  await cluster.submit("cancelled");
  await cluster.submitMany(VMS - 22, "encode");
  await cluster.submit("waits", { memoryBytes: TOO_MUCH });
  await until(`${VMS} VMs run`, async () => {
    const vms = await cluster.ask("GET", "/v1/vms");
    return vms.filter((vm) => vm.status === "running").length >= VMS;
  }, 1_200_000);
};

// Name, path, and the status of its answer.
const PAGES = [
  ["first", "/", 200],
  ["jobs", "/jobs", 200],
  ["job", "/jobs/talks-0001", 200],
  ["question", "/jobs/talks-0001/cancel", 200],
  ["queue", "/queue", 200],
  ["vms", "/vms", 200],
  ["vm", "/vms/talks-0001", 200],
  ["console", "/vms/talks-0001/console", 200],
  ["screen", "/vms/talks-0001/screen", 200],
  ["volumes", "/volumes", 200],
  ["volume", "/volumes/tables", 200],
  ["hosts", "/hosts", 200],
  ["host", "/hosts/host01", 200],
  ["sites", "/sites", 200],
  ["rentals", "/rentals", 200],
  ["tenants", "/tenants", 200],
  ["tenant", "/tenants/acme", 200],
  ["audit", "/audit", 200],
  ["refusal", "/jobs/none-0001", 404],
  ["login", "/login", 200],
];

// Whatever stands on the page while axe-core looks at it stays there: the stream of events does not begin.
const look = async (colorScheme, [size, viewport]) => {
  const { context, page } = await session(tokens["default/root"].token, { colorScheme, viewport });
  await context.route(/\/live\?/, () => {});
  for (const [name, address, status] of PAGES) {
    const answer = await page.goto(address);
    check(answer.status() === status, `${address}: status ${answer.status()}`);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    check(wide <= 0, `${address} is ${wide} px wider than the ${size} screen`);
    await picture(page, `${name}-${colorScheme}-${size}`);
    await page.evaluate(`${axe.source}; undefined`);
    const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
    const told = violations.map((one) => `${one.id}: ${one.help}: ${one.nodes.map((node) => node.html).slice(0, 3).join(" ")}`);
    check(told.length === 0, `${address}, ${colorScheme}, ${size}:\n${told.join("\n")}`);
  }
  await context.close();
};

// How long the first page takes is said, and judged by whoever reads it: this machine may be slow at the moment.
const sizeOfFirstPage = async () => {
  const { context, page } = await session(tokens["default/root"].token);
  const times = await page.evaluate(async (times) => {
    const all = [];
    for (let time = 0; time < times; time++) {
      const began = performance.now();
      await (await fetch("/")).text();
      all.push(performance.now() - began);
    }
    return all.sort((a, b) => a - b);
  }, 11);
  console.log(`    first page: ${times[0].toFixed(0)} to ${times.at(-1).toFixed(0)} ms, mostly ${times[5].toFixed(0)} ms`);
  const before = cluster.controllerCpuMs();
  await pause(10_000);
  console.log(`    the controller with ${VMS} VMs takes ${((cluster.controllerCpuMs() - before) / 10_000).toFixed(2)} CPUs`);
  const bytes = await page.evaluate(async () => {
    const files = [...document.querySelectorAll("link[rel=stylesheet], script[src]")].map((file) => file.href || file.src);
    const parts = await Promise.all(["/", ...files].map(async (file) => (await (await fetch(file)).arrayBuffer()).byteLength));
    return parts.reduce((sum, part) => sum + part, 0);
  });
  console.log(`    first page with its style and script: ${bytes} bytes`);
  check(bytes <= FIRST_PAGE_BYTES_MAX, `the first page has ${bytes} bytes, more than ${FIRST_PAGE_BYTES_MAX}`);
  await context.close();
};

const byKeyboard = async () => {
  const { context, page } = await session(tokens["default/root"].token);
  await page.goto("/");
  await tabTo(page, "Skip to the content");
  await tabTo(page, "Jobs");
  await page.keyboard.press("Enter");
  await page.waitForURL("/jobs");
  await tabTo(page, "find");
  await page.keyboard.type("cancelled");
  await page.keyboard.press("Enter");
  await page.waitForURL(/find=cancelled/);
  await tabTo(page, "cancelled-0001");
  await page.keyboard.press("Enter");
  await page.waitForURL("/jobs/cancelled-0001");
  await tabTo(page, "Cancel this job …");
  await page.keyboard.press("Enter");
  await page.waitForURL("/jobs/cancelled-0001/cancel");
  await tabTo(page, "Cancel the job");
  await page.keyboard.press("Enter");
  await page.waitForURL("/jobs/cancelled-0001");
  await page.evaluate(() => (window.isTheSame = true));
  // The page says so without being loaded anew.
  await until("the page says that the job is cancelled", async () => /state\s+cancelled/.test(await textOf(page)));
  check(await page.evaluate(() => window.isTheSame), "the page was loaded anew");
  await context.close();
};

const withoutJavaScript = async () => {
  const { context, page } = await session(tokens["acme/ann"].token, { javaScriptEnabled: false });
  check((await textOf(page)).includes("What is wrong"), "the first page can't be read");
  await page.getByRole("link", { name: "Jobs", exact: true }).click();
  await page.locator("#find").fill("sesame-0003");
  await page.getByRole("button", { name: "Find" }).click();
  await page.getByRole("link", { name: "sesame-0003" }).click();
  await page.getByRole("link", { name: "Cancel this job …" }).click();
  check(/Cancel job \S*sesame-0003\?/.test(await textOf(page)), `no question: ${await textOf(page)}`);
  await page.getByRole("link", { name: "No, go back" }).click();
  check((await textOf(page)).includes("Where it stands"), "the job can't be read");
  await context.close();
};

const aLogThatGrows = async () => {
  const { context, page } = await session(tokens["default/root"].token);
  const streams = [];
  // The first page may begin its own stream late.
  const isOfJob = (request) => request.resourceType() === "eventsource" && request.url().includes("/jobs/");
  page.on("request", (request) => isOfJob(request) && streams.push(request.url()));
  await page.goto("/jobs/talks-0001");
  const last = async () => Number((await page.locator(".log > div").last().innerText()).replace("line ", ""));
  const first = await until("a line", last);
  await until("further lines", async () => (await last()) >= first + 5);
  const lines = await page.locator(".log > div").allInnerTexts();
  check(new Set(lines).size === lines.length, `a line is there twice: ${lines}`);
  check(streams.length === 1, `a page of a running job has these streams: ${streams}`);
  await context.close();
};

const aControllerThatIsAway = async () => {
  const { context, page } = await session(tokens["default/root"].token);
  const [first, jobs, log] = [page, await context.newPage(), await context.newPage()];
  const pages = [first, jobs, log];
  await jobs.goto("/jobs");
  await log.goto("/jobs/talks-0001");
  for (const one of pages) await one.evaluate(() => (window.isTheSame = true));
  await cluster.stopController();
  for (const one of pages) {
    await until("the page says that the controller is away", async () => (await banner(one)).includes("connection to the controller is lost"));
  }
  await picture(first, "lost");
  await cluster.start();
  for (const one of pages) await until("the page says that the controller is back", async () => (await banner(one)) === "");
  const job = await cluster.submit("later");
  await until("the new job is on the open page", async () => (await textOf(jobs)).includes(job));
  const before = await log.locator(".log > div").count();
  await until("the log goes on", async () => (await log.locator(".log > div").count()) > before);
  const lines = await log.locator(".log > div").allInnerTexts();
  check(new Set(lines).size === lines.length, `a line is there twice: ${lines}`);
  for (const one of pages) check(await one.evaluate(() => window.isTheSame), `${one.url()} was loaded anew`);
  await context.close();
};

// What is drawn is seen without JavaScript, with words where one points and a table below.
const drawn = async () => {
  const { context, page } = await session(tokens["default/root"].token, { javaScriptEnabled: false, viewport: PHONE });
  await until("the curves of a job", async () => {
    await page.goto("/jobs/talks-0001");
    return (await page.locator(".curve svg").count()) === 3;
  });
  const said = await page.locator(".curve rect title").first().textContent();
  check(/\d\d:\d\d:\d\d to .* run$/.test(said), `a curve says: ${said}`);
  check((await page.locator("[aria-labelledby=curves] tbody tr").count()) > 0, "the curves have no table");
  await page.goto("/vms/talks-0001");
  check((await page.locator(".curve svg").count()) === 3, "the VM's page has no curves");
  await page.goto("/sites");
  const sites = Math.ceil(HOSTS / 8);
  check((await page.locator("svg.map circle").count()) === sites, "not all sites are on the map");
  check((await page.locator("[aria-labelledby=between] tbody tr").count()) === sites * (sites - 1), "the map has no table");
  await context.close();
};

const rowsOf = async (page) => (await page.locator(".xterm-rows").innerText()).replaceAll("\u00a0", " ");
const isAttached = (page) => until("the page is attached", async () => (await page.locator("#machine-status").innerText()).startsWith("Attached"));

const aConsole = async () => {
  const { context, page } = await session(tokens["acme/ann"].token);
  const requested = [];
  page.on("request", (request) => requested.push(request.url()));
  await page.goto("/vms/sesame-0001");
  check(!requested.some((one) => /xterm|novnc|console\.js/.test(one)), `a page without a console has loaded one: ${requested}`);
  await tabTo(page, "Console");
  await page.keyboard.press("Enter");
  await page.waitForURL("/vms/**/console");
  await isAttached(page);
  check((await textOf(page)).includes("panic: no root"), "what the VM has printed can't be read");
  await page.keyboard.type("typed by hand");
  await until("what was typed comes back", async () => (await rowsOf(page)).includes("typed by hand"));
  await page.keyboard.press("Tab");
  check((await page.locator("#machine-enter:focus").count()) === 0, "the console does not take the key Tab");
  await page.keyboard.press("Shift+F6");
  check((await page.locator("#machine-enter:focus").count()) === 1, "Shift+F6 does not leave the console");
  await page.keyboard.press("Enter");
  await page.keyboard.type(" and again");
  await until("it goes on", async () => (await rowsOf(page)).includes("and again"));
  await picture(page, "console-open");
  await page.evaluate(() => (window.isTheSame = true));
  await cluster.stopController();
  await until("the page says that the controller is away", async () => (await page.locator("#machine-status").innerText()).includes("is lost"));
  await cluster.start();
  await isAttached(page);
  await page.locator("#machine-enter").click();
  await page.keyboard.type("after the restart");
  await until("the console goes on", async () => (await rowsOf(page)).includes("after the restart"));
  check(await page.evaluate(() => window.isTheSame), "the page was loaded anew");
  await context.close();
};

const aScreen = async () => {
  const { context, page } = await session(tokens["acme/ann"].token);
  await page.goto("/vms/sesame-0001/screen");
  await until("the screen is green", () =>
    page.evaluate(() => {
      const canvas = document.querySelector("#machine canvas");
      const pixel = canvas && canvas.width > 0 && canvas.getContext("2d").getImageData(5, 5, 1, 1).data;
      return pixel && pixel[0] === 0 && pixel[1] === 255 && pixel[2] === 0;
    }),
  );
  await picture(page, "screen-open");
  await page.locator("#machine-enter").focus();
  await page.keyboard.press("Enter");
  check((await page.locator("#machine canvas:focus").count()) === 1, "the screen does not get the focus by a key");
  await page.keyboard.press("Shift+F6");
  check((await page.locator("#machine-enter:focus").count()) === 1, "Shift+F6 does not leave the screen");
  await context.close();
};

// What comes of a WebSocket that a page opens.
const opened = (page, address) =>
  page.evaluate(
    (to) =>
      new Promise((done) => {
        const socket = new WebSocket(to, "binary");
        socket.addEventListener("open", () => done(true));
        socket.addEventListener("close", () => done(false));
      }),
    address,
  );

const consolesOfOthers = async () => {
  const ann = await session(tokens["acme/ann"].token);
  const others = [await session(tokens["blue/bob"].token), await session(tokens["acme/amy"].token)];
  for (const name of ["sesame-0001", "acme~sesame-0001"]) {
    for (const end of ["console/attach", "vnc"]) {
      for (const { page } of others) check(!(await opened(page, `/vms/${name}/${end}`)), `${name}/${end} is open to others`);
      check(await opened(ann.page, `/vms/${name}/${end}`), `${name}/${end} is not open to its own user`);
    }
  }
  // A page of nobody's has the same browser send the request.
  const foreign = await ann.context.newPage();
  const socket = `${cluster.url.replace("https", "wss")}/vms/sesame-0001/vnc`;
  check(!(await opened(foreign, socket)), "a page of another server has opened a screen");
  for (const { context } of [ann, ...others]) await context.close();
};

// All pages that links lead to, at most so many.
const walk = async (page, most = 80) => {
  const [seen, left] = [new Map(), ["/"]];
  while (left.length > 0 && seen.size < most) {
    const address = left.shift();
    if (seen.has(address)) continue;
    const { text } = await fetched(page, address);
    seen.set(address, text);
    const links = [...text.matchAll(/href="(\/[^"]*)"/g)].map((found) => found[1].replaceAll("&#38;", "&"));
    left.push(...links.filter((link) => !/^\/(web|logout|authority)|output\.tar/.test(link)));
  }
  return seen;
};

const twoTenants = async () => {
  const of = { ann: await session(tokens["acme/ann"].token), amy: await session(tokens["acme/amy"].token), bob: await session(tokens["blue/bob"].token) };
  const sees = { ann: "sesame", amy: null, bob: "bluebell" };
  for (const [who, { page }] of Object.entries(of)) {
    const all = await walk(page);
    check(all.size > (sees[who] ? 10 : 5), `${who} finds ${all.size} pages`);
    const whole = [...all.values()].join("\n");
    check(!sees[who] || whole.includes(`${sees[who]}-0001`), `${who} does not see the own things`);
    for (const foreign of ["sesame-", "bluebell-", "sesamewaits", "bluebellwaits", "bluebelldata", "encode-", "talks-"]) {
      if (sees[who] && foreign.startsWith(sees[who])) continue;
      const at = [...all].filter(([, text]) => text.includes(foreign)).map(([address]) => address);
      check(at.length === 0, `${who} sees ${foreign} at ${at}`);
    }
  }
  // What another tenant has answers as what nobody has.
  for (const [theirs, nobodys] of [["bluebell-0001", "neverthere-0001"], ["blue~bluebell-0001", "blue~neverthere-0001"]]) {
    const kinds = [
      "/jobs/NAME", "/jobs/NAME/cancel", "/vms/NAME", "/vms/NAME/stop", "/live?of=/jobs/NAME&after=0", "/vms/NAME/console",
      "/vms/NAME/console/attach", "/vms/NAME/screen", "/vms/NAME/vnc",
    ];
    for (const kind of kinds) {
      const said = async (name) => {
        const { status, text } = await fetched(of.ann.page, kind.replace("NAME", name));
        return `${status} ${text.replaceAll(name, "NAME")}`;
      };
      const [is, was] = [await said(theirs), await said(nobodys)];
      check(is === was && is.startsWith("404"), `${kind}: ${is.slice(0, 200)}`);
    }
  }
  // The same page is open for both while something changes.
  await of.ann.page.goto("/jobs");
  await of.bob.page.goto("/jobs");
  await cluster.submit("sesamelater", { token: tokens["acme/ann"].token });
  await cluster.submit("bluebelllater", { token: tokens["blue/bob"].token });
  await until("each sees the own new job", async () => {
    const [ann, bob] = [await textOf(of.ann.page), await textOf(of.bob.page)];
    check(!ann.includes("bluebell") && !bob.includes("sesame"), "an open page shows another tenant's job");
    return ann.includes("sesamelater-0001") && bob.includes("bluebelllater-0001");
  });
  for (const { context } of Object.values(of)) await context.close();
};

const aTokenThatIsOver = async () => {
  const made = await cluster.token("acme/al", "member");
  const { context, page } = await session(made.token);
  await cluster.ask("DELETE", `/v1/tenants/acme/users/al/tokens/${made.id}`);
  await page.waitForURL(/\/login/);
  await context.close();
};

// Last, because it makes the browser complain.
const nothingElseRuns = async () => {
  check(complaints.length === 0, `the browser has complained:\n${complaints.join("\n")}`);
  const { context, page } = await session(tokens["default/root"].token);
  await page.evaluate(() => {
    const script = document.createElement("script");
    script.textContent = "window.hasRun = true";
    document.body.append(script);
  });
  check(!(await page.evaluate(() => window.hasRun)), "a script of somebody else has run");
  await until("the browser says what it has refused", () => complaints.some((one) => one.includes("Content Security Policy")));
  const cookies = await context.cookies();
  const kept = cookies.map((one) => [one.name, one.httpOnly, one.secure, one.sameSite].join(" "));
  check(kept.join() === "__Host-perigee true true Strict", `the cookies are ${kept}`);
  await context.close();
};

// ---- All of it ----

// As docs/web.md says: the browser trusts the cluster's authority for web pages.
const trustAuthority = () => {
  const store = path.join(home, ".pki/nssdb");
  mkdirSync(store, { recursive: true });
  const authority = path.join(cluster.state, "authority/ca.pem");
  for (const words of [["-N", "--empty-password"], ["-A", "-t", "C,,", "-n", "perigee", "-i", authority]]) {
    const ended = spawnSync("certutil", ["-d", `sql:${store}`, ...words], { encoding: "utf8", timeout: 60_000 });
    check(ended.status === 0, `certutil ${words.join(" ")}: ${ended.stderr}`);
  }
};

const main = async () => {
  mkdirSync(out, { recursive: true });
  await step("a controller", () => cluster.start());
  await step(`${HOSTS} hosts`, () => cluster.addHosts(HOSTS));
  await step(`${VMS} VMs`, fill);
  trustAuthority();
  browser = await chromium.launch({ executablePath: given("CHROMIUM"), args: FLAGS, env: { ...process.env, HOME: home } });
  for (const size of [["wide", WIDE], ["phone", PHONE]]) {
    for (const scheme of ["light", "dark"]) await step(`each page, ${scheme}, ${size[0]}`, () => look(scheme, size));
  }
  await step("the first page is small", sizeOfFirstPage);
  await step("by keyboard alone", byKeyboard);
  await step("without JavaScript", withoutJavaScript);
  await step("a log that grows", aLogThatGrows);
  await step("curves and a map", drawn);
  await step("a console", aConsole);
  await step("a screen", aScreen);
  await step("two tenants", twoTenants);
  // What somebody has tried in vain is in the own audit log, with the name that was tried.
  await step("consoles of others", consolesOfOthers);
  await step("a token that is over", aTokenThatIsOver);
  await step("a controller that is away", aControllerThatIsAway);
  await step("nothing else runs", nothingElseRuns);
};

let code = 0;
try {
  await main();
  console.log(`all in order; pictures of the pages are in ${out}`);
} catch (failure) {
  console.error(`FAILED: ${failure instanceof Failure ? failure.message : failure.stack}`);
  for (const log of ["controller.log", "hosts.log"]) {
    try {
      console.error(`--- ${log}\n${readFileSync(path.join(cluster.directory, log), "utf8").slice(-3000)}`);
    } catch {
      // It was not begun.
    }
  }
  code = 1;
} finally {
  await browser?.close();
  await cluster.stop();
}
process.exit(code);
