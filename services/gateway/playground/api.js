// Calls of the gateway: JSON requests, streams of events, and the API key, which stays in memory only.

let key = '';

export function setKey(value) {
  key = value.trim();
}

// Whether this server needs a key that the user has not given. The gateway says so in the page itself, so that no
// call has to fail first.
const needsKey = () => 'needsKey' in document.body.dataset && !key;

// Why a call has status 401.
export const keyProblem = () => (key ? 'This key is not valid.' : 'This server needs an API key.');

// An error reply of the gateway, or a connection that failed.
export class CallError extends Error {
  constructor(message, status, { code, param } = {}) {
    super(message);
    this.status = status;
    // The machine-readable reason, and the field of the request.
    this.code = code;
    this.param = param;
  }
}

async function call(path, options = {}) {
  if (needsKey()) throw new CallError(keyProblem(), 401);
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new CallError('The server does not answer. Is it running?', 0);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new CallError(body.error?.message ?? `The server answered ${response.status}.`, response.status, body.error);
  }
  return response;
}

export async function getJson(path) {
  return (await call(path)).json();
}

const json = (body) => ({
  method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body),
});

export async function postJson(path, body, signal) {
  return (await call(path, { ...json(body), signal })).json();
}

// Yields the events of a streamed chat until it ends. Aborting `signal` cancels the request.
export async function* streamChat(body, signal) {
  const response = await call('/v1/chat/completions', {
    ...json({ ...body, stream: true, stream_options: { include_usage: true } }), signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new CallError('The connection broke before the answer was complete.', 0);
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ')) continue;
      if (line === 'data: [DONE]') return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new CallError(event.error.message, event.error.status);
      yield event;
    }
  }
}
