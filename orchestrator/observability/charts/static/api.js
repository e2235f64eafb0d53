// The server's answers, and its stream of changes.

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) query.append(name, one);
  const response = await fetch(`/api/${path}?${query}`);
  const answer = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

/** Calls `heard` with {runs: {id: line or null}} or {anew: true}; `state` with "on" or "off". A page that nobody sees does
 *  not listen: browsers have six connections to a server, for all of its pages together. Seen again it hears {anew}. */
export function listen(heard, state) {
  let source = null;
  const open = () => {
    source = new EventSource("/api/live");
    source.onopen = () => state("on");
    source.onerror = () => state("off"); // it tries again by itself
    source.onmessage = (event) => heard(JSON.parse(event.data));
  };
  const look = () => {
    source?.close();
    source = null;
    if (!document.hidden) open();
  };
  document.addEventListener("visibilitychange", look);
  look();
}
