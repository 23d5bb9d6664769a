// A model endpoint for the tests: it speaks enough of the Messages API for Claude Code to take
// a turn, and answers by a script that stands in the prompt.
//
//   bash: CMD      asks for the Bash tool with CMD
//   free: CMD      the same, with dangerouslyDisableSandbox
//   edit: PATH     asks for the Write tool
//   knows: W O R D says whether WORD stands anywhere in what it was sent
//
// What the tool answered comes back as the turn's text, between <<< and >>>.
import http from "node:http";

const [port] = process.argv.slice(2);

function text(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((b) => (b.type === "text" ? b.text : b.type === "tool_result" ? text(b.content) : "")).join("\n");
}

function answer(body) {
  const last = body.messages?.findLast((m) => m.role === "user"); // the system speaks behind it
  const blocks = Array.isArray(last?.content) ? last.content : [];
  const result = blocks.find((b) => b.type === "tool_result");
  if (result) return { text: `<<<${result.is_error ? "error: " : ""}${text(result.content)}>>>` };
  const known = /^knows: (.*)$/m.exec(text(last?.content));
  if (known) return { text: JSON.stringify(body).includes(known[1].replaceAll(" ", "")) ? "known" : "unknown" };
  const asked = /^(bash|free|edit): (.*)$/m.exec(text(last?.content));
  const has = (name) => (body.tools ?? []).some((t) => t.name === name);
  if (!asked || !has("Bash")) return { text: "nothing to do" };
  const [, word, arg] = asked;
  if (word === "edit") return { tool: "Write", input: { file_path: arg, content: "planted" } };
  return { tool: "Bash", input: { command: arg, description: "test", ...(word === "free" ? { dangerouslyDisableSandbox: true } : {}) } };
}

let n = 0;
function events(body) {
  const a = answer(body);
  const id = `msg_${++n}`;
  const out = [["message_start", { message: { id, type: "message", role: "assistant", model: body.model, content: [], stop_reason: null, stop_sequence: null, usage: { input_tokens: 1, output_tokens: 1 } } }]];
  if (a.tool) {
    out.push(["content_block_start", { index: 0, content_block: { type: "tool_use", id: `toolu_${n}`, name: a.tool, input: {} } }]);
    out.push(["content_block_delta", { index: 0, delta: { type: "input_json_delta", partial_json: JSON.stringify(a.input) } }]);
  } else {
    out.push(["content_block_start", { index: 0, content_block: { type: "text", text: "" } }]);
    out.push(["content_block_delta", { index: 0, delta: { type: "text_delta", text: a.text } }]);
  }
  out.push(["content_block_stop", { index: 0 }]);
  out.push(["message_delta", { delta: { stop_reason: a.tool ? "tool_use" : "end_turn", stop_sequence: null }, usage: { output_tokens: 1 } }]);
  out.push(["message_stop", {}]);
  return out;
}

http
  .createServer((req, res) => {
    let raw = "";
    req.on("data", (d) => (raw += d));
    req.on("end", () => {
      if (!req.url.startsWith("/v1/messages") || req.url.includes("count_tokens")) {
        res.writeHead(404, { "content-type": "application/json" });
        res.end('{"type":"error","error":{"type":"not_found_error","message":"not here"}}');
        return;
      }
      const body = JSON.parse(raw);
      const list = events(body);
      if (!body.stream) {
        const a = answer(body);
        res.writeHead(200, { "content-type": "application/json" });
        res.end(JSON.stringify({ id: `msg_${++n}`, type: "message", role: "assistant", model: body.model, content: [{ type: "text", text: a.text ?? "nothing" }], stop_reason: "end_turn", stop_sequence: null, usage: { input_tokens: 1, output_tokens: 1 } }));
        return;
      }
      res.writeHead(200, { "content-type": "text/event-stream" });
      for (const [type, data] of list) res.write(`event: ${type}\ndata: ${JSON.stringify({ type, ...data })}\n\n`);
      res.end();
    });
  })
  .listen(Number(port), "127.0.0.1", () => console.error("model endpoint on", port));
