// A real controller with TLS, and hosts made of memory (experiments/queue/src/pages.rs) in another process. All of it ends with the test.
import { spawn } from "node:child_process";
import { existsSync, mkdirSync, openSync, readFileSync } from "node:fs";
import http from "node:http";
import net from "node:net";
import path from "node:path";

// These machines may have a tenth of the speed that they usually have.
const DEADLINE_MS = 300_000;

export class Failure extends Error {}

export const check = (right, what) => {
  if (!right) throw new Failure(what);
};

export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// Asks until the answer is true, and returns the answer.
export const until = async (what, look, deadlineMs = DEADLINE_MS) => {
  const ends = Date.now() + deadlineMs;
  let last;
  while (Date.now() < ends) {
    last = await look();
    if (last) return last;
    await pause(200);
  }
  throw new Failure(`waited ${deadlineMs / 1000} s for this: ${what}`);
};

const unusedPort = () =>
  new Promise((done, failed) => {
    const server = net.createServer().once("error", failed);
    server.listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => done(port));
    });
  });

export class Cluster {
  constructor(directory, perigee, hosts) {
    Object.assign(this, { directory, perigee, hostsProgram: hosts, controller: null, hosts: null });
    this.state = path.join(directory, "state");
    this.socket = path.join(directory, "socket");
    mkdirSync(directory, { recursive: true });
  }

  async start() {
    this.port ??= await unusedPort();
    this.url = `https://127.0.0.1:${this.port}`;
    const words = ["controller", "run", "--config", "/dev/null", "--state", this.state, "--listen", `unix:${this.socket}`];
    this.controller = this.run("controller", this.perigee, [...words, "--listen", `127.0.0.1:${this.port}`]);
    await until("the controller answers", async () => {
      check(this.controller.exitCode === null, `the controller has ended: ${this.directory}/controller.log`);
      return existsSync(this.socket) && (await this.ask("GET", "/v1/me").catch(() => null));
    });
  }

  async addHosts(count) {
    const words = ["hosts", this.state, `unix:${this.socket}`, String(count)];
    this.hosts = this.run("hosts", this.hostsProgram, words);
    await until(`${count} hosts are registered`, () => {
      check(this.hosts.exitCode === null, `the program with the hosts has ended: ${this.directory}/hosts.log`);
      return readFileSync(path.join(this.directory, "hosts.log"), "utf8").includes("hosts are registered");
    });
  }

  run(name, program, words) {
    const log = openSync(path.join(this.directory, `${name}.log`), "a");
    // It ends with this process, whatever ends this.
    return spawn("setpriv", ["--pdeathsig", "KILL", program, ...words], { stdio: ["ignore", log, log], env: { ...process.env, PERIGEE_LOG: "warn" } });
  }

  // The CPU time that the controller has taken. The kernel counts in hundredths of a second.
  controllerCpuMs() {
    const stat = readFileSync(`/proc/${this.controller.pid}/stat`, "utf8");
    const [user, system] = stat.slice(stat.lastIndexOf(")") + 2).split(" ").slice(11, 13);
    return (Number(user) + Number(system)) * 10;
  }

  async stopController() {
    await stop(this.controller);
  }

  async stop() {
    await stop(this.controller);
    await stop(this.hosts);
  }

  // A user's token, with its id. The user and the tenant are made if they do not exist.
  async token(of, role) {
    const [tenant, user] = of.split("/");
    const tenants = await this.ask("GET", "/v1/tenants");
    if (!tenants.some((one) => one.name === tenant)) await this.ask("POST", "/v1/tenants", { name: tenant });
    const address = `/v1/tenants/${tenant}/users/${user}`;
    await this.ask("PUT", address, { role });
    return this.ask("POST", `${address}/tokens`, { life_s: 86_400 });
  }

  // A request to the API; without a token as root of this machine.
  ask(method, address, body, token) {
    const headers = { host: "localhost", "content-type": "application/json" };
    if (token) headers.authorization = `Bearer ${token}`;
    return new Promise((done, failed) => {
      const request = http.request({ socketPath: this.socket, method, path: address, headers, timeout: DEADLINE_MS }, (answer) => {
        const parts = [];
        answer.on("data", (part) => parts.push(part));
        answer.on("error", failed);
        answer.on("end", () => {
          const text = Buffer.concat(parts).toString();
          if (answer.statusCode >= 400) failed(new Failure(`${method} ${address}: ${answer.statusCode} ${text}`));
          else done(text ? JSON.parse(text) : null);
        });
      });
      request.on("error", failed);
      request.on("timeout", () => request.destroy(new Failure(`${method} ${address}: no answer`)));
      request.end(body === undefined ? undefined : JSON.stringify(body));
    });
  }

  async submit(name, { token, memoryBytes = 256 * 2 ** 20 } = {}) {
    const job = {
      name, cpus: 1, image: "debian", command: ["work"], env: {}, memory_bytes: memoryBytes, output_bytes: 2 ** 20,
      volumes: [], outputs: ["/output"], start: "anywhere", may_migrate: false,
    };
    return (await this.ask("POST", "/v1/jobs", job, token)).id;
  }

  async submitMany(count, name, options) {
    let left = count;
    const some = async () => {
      while (left-- > 0) await this.submit(name, options);
    };
    await Promise.all(Array.from({ length: 8 }, some));
  }
}

const stop = async (child) => {
  if (!child || child.exitCode !== null || child.signalCode !== null) return;
  const ended = new Promise((done) => child.once("exit", done));
  child.kill("SIGTERM");
  const late = setTimeout(() => child.kill("SIGKILL"), 60_000);
  await ended;
  clearTimeout(late);
};
