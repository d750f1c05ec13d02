// The one line above everything: what stands in the way, and what the node's user can do about it.

import { called, plural } from "./text.js";

const NAMED = 3;

const until = (ban) => (ban.until == null ? "for ever" : `until round ${ban.until}`);

function names(peers, total) {
  const more = total - Math.min(NAMED, peers.length);
  return peers.slice(0, NAMED).map(called).join(", ") + (more > 0 ? ` and ${plural(more, "other")}` : "");
}

// What to say of a node that answers, the worst first; null where nothing has to be said. soft: nothing is broken.
export function noticeOf(node) {
  const own = (node.bans ?? []).find((ban) => ban.peer === node.peer);
  if (own) {
    return {
      soft: false,
      first: `The swarm banned this node ${until(own)} and does without it.`,
      rest: "Most often one key ran in two places, or an old copy of a data folder was put back. The proof lies in `evidence/` of the other nodes’ data folders, and `shoal evidence` checks it. Ask whoever holds the authority’s key.",
    };
  }
  if (node.phase === "no quorum") {
    const here = node.voters - node.missing;
    const quorum = node.lying ? "more than two thirds" : "a majority";
    const whom = node.missing ? ` Start ${names(node.missing_peers, node.missing)} again, each with its \`--data-dir\`.` : "";
    const gone = node.long_missing ? ` Nothing was heard for an hour of ${names(node.long_missing_peers, node.long_missing)}; for who of them is gone for good there is \`shoal rebase --forget\`, where the authority’s key is.` : "";
    return {
      soft: false,
      first: `Rounds wait for ${quorum}: ${here} of ${plural(node.voters, "voter")} here.`,
      rest: `This node trains on alone meanwhile.${whom}${gone}`,
    };
  }
  if (node.paused) {
    const why = node.why_paused ? `This node is paused: ${node.why_paused}.` : "This node is paused.";
    const until = (node.why_paused || "").endsWith("(--only-when)") ? "as long as that is so" : "until you resume it";
    return { soft: true, first: why, rest: `It votes and keeps the state, but trains nothing ${until}.` };
  }
  return null;
}
