// A client on npm's @agentclientprotocol/sdk: two connections, each through a process of
// its own, hold a session each with one agent at once.
//
//   node client.mjs SDK CWD PROGRAM [ARG]…
//
// SDK is the path of the library's module; PROGRAM speaks ACP on its stdio. It prints
// "kill" and waits for a line on stdin while the agent's runtime is killed, and in the
// end prints one line of JSON: what each connection saw.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { Readable, Writable } from "node:stream";
import { pathToFileURL } from "node:url";

const [sdk, cwd, program, ...args] = process.argv.slice(2);
const acp = await import(pathToFileURL(sdk).href);

function connection(name) {
  const child = spawn(program, args, { stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise((resolve) => child.on("exit", (code) => resolve(code)));
  const seen = { asked: [], replay: [] };
  const app = acp
    .client({ name })
    .onRequest(acp.methods.client.session.requestPermission, (ctx) => {
      seen.asked.push(ctx.params.toolCall.title);
      return { outcome: { outcome: "selected", optionId: "allow" } };
    })
    .onNotification(acp.methods.client.session.update, (ctx) => {
      const u = ctx.params.update;
      if (u.content?.type === "text") seen.replay.push(`${u.sessionUpdate}: ${u.content.text}`);
    });
  const { client, agent, close, ...rest } = app.connect(acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout)));
  return { name, seen, child, ended, ctx: agent ?? client ?? rest.context, close };
}

// turn prompts and collects the streamed text; chunks is how many updates it came in.
async function turn(session, text) {
  const done = session.prompt(text);
  let answer = "";
  for (let chunks = 0; ; ) {
    const m = await session.nextUpdate();
    if (m.kind === "stop") return { answer, chunks, stop: m.stopReason, same: (await done).stopReason === m.stopReason };
    if (m.update.sessionUpdate === "agent_message_chunk") {
      answer += m.update.content.text;
      chunks++;
    }
  }
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const both = [connection("one"), connection("two")];
const each = (f) => Promise.all(both.map(f));

await each(async (c) => {
  const answer = await c.ctx.request(acp.methods.agent.initialize, {
    protocolVersion: acp.PROTOCOL_VERSION,
    clientCapabilities: { fs: { readTextFile: true, writeTextFile: true }, terminal: true },
  });
  c.seen.protocol = answer.protocolVersion;
  c.session = await c.ctx.buildSession(cwd).start();
});
await each(async (c) => (c.seen.echo = await turn(c.session, `echo this is what ${c.name} said`)));
await each(async (c) => (c.seen.permission = await turn(c.session, `permission for ${c.name}`)));
await each(async (c) => {
  const sleeping = turn(c.session, "sleep 100");
  await c.ctx.notify(acp.methods.agent.session.cancel, { sessionId: c.session.sessionId });
  c.seen.cancelled = (await sleeping).stop;
});
const open = both.map((c) => c.session.prompt("sleep 100").then(() => "it ended well", (e) => e.message));
console.log("kill");
await lines.next();
const errors = await Promise.all(open);
await each(async (c, i) => {
  c.seen.error = errors[i];
  const id = c.session.sessionId;
  c.session.dispose();
  c.seen.replay.length = 0;
  await c.ctx.request(acp.methods.agent.session.load, { sessionId: id, cwd, mcpServers: [] });
  c.seen.stop = (await c.ctx.request(acp.methods.agent.session.prompt, { sessionId: id, prompt: [{ type: "text", text: `echo ${c.name} is back` }] })).stopReason;
});
await each(async (c) => {
  c.child.stdin.end();
  c.seen.code = await c.ended;
});
console.log(JSON.stringify(Object.fromEntries(both.map((c) => [c.name, c.seen]))));
process.exit(0);
