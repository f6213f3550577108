// Keeps the chat, the race and the settings in the tab's sessionStorage, so that a reload or a visit to another
// page does not lose them. The API key is never stored.

const KEY = 'outrider-playground';
// Browsers give a page some 5 million characters. If a limit is too much for this browser, the next one is tried.
const LIMITS = [4_000_000, 2_000_000, 500_000, 0];

// Returns the stored state, or an empty object.
export function loadState() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

// Stores {turns, race, ...rest}. If there is too little room, the oldest answers lose their rounds, and then go.
export function saveState({ turns, race, ...rest }) {
  for (const limit of LIMITS) {
    try {
      const lanes = fitted(race, limit / 2);
      const state = { ...rest, race: lanes.length === race.length ? lanes : [] };
      const room = limit - state.race.reduce((sum, one) => sum + JSON.stringify(one).length, 0);
      sessionStorage.setItem(KEY, JSON.stringify({ ...state, turns: fitted(turns, room) }));
      return;
    } catch {
      // The storage is full or turned off. The page works without it.
    }
  }
}

// Returns the newest answers that fit into `room` characters.
function fitted(answers, room) {
  const sizes = answers.map((one) => JSON.stringify(one).length);
  let total = sizes.reduce((sum, size) => sum + size, 0);
  const kept = answers.map((one, at) => {
    if (total <= room) return one;
    const bare = { ...one, record: withoutRounds(one.record) };
    const size = JSON.stringify(bare).length;
    total -= sizes[at] - size;
    sizes[at] = size;
    return bare;
  });
  let first = 0;
  while (total > room && first < kept.length) total -= sizes[first++];
  return kept.slice(first);
}

function withoutRounds(record) {
  return { ...record, parts: record.parts.map((part) => ({ ...part, round: null })) };
}
