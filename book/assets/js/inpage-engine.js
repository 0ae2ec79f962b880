// llama.cpp in the page: wllama, one request at a time, and the model's own tokens for what is drawn.
//
//   start(blob, {wasm})  →  engine
//   engine.ask({prompt, words, fresh, candidates, signal, onText, onRead})
//     →  {text, ended, candidates, cached, computed, firstMs}
//        fresh        the cache is emptied first; else what it holds and the prompt begins with is not computed again
//        candidates   how many of each token's likeliest rivals to tell, with the natural logarithm of their probability
//   engine.tokens(text)  →  the text, cut as the model reads it
import { Wllama } from "../vendor/wllama/index.min.js";

const WASM = new URL("../vendor/wllama/wllama.wasm", import.meta.url).href;
const CONTEXT = 2048; // tokens the cache has room for
const BATCH = 8; // tokens read between two reports; on one thread larger groups are not faster
const SEED = 0;

export async function start(blob) {
  let fail;
  const failed = new Promise((_, reject) => (fail = reject));
  failed.catch(() => {});
  const silent = () => {};
  const logger = { debug: silent, log: silent, warn: silent, error: (what) => fail(what instanceof Error ? what : new Error(what?.message || String(what))) };
  // first, so that a file that has none costs no engine
  const tokens = await vocabulary(blob).catch(() => { throw new Error("the file has no vocabulary that can be read"); });
  // its own cache of files would need https or localhost; it is given the file, so it needs none
  const wllama = new Wllama({ default: WASM }, { suppressNativeLog: true, logger, cacheManager: {} });
  wllama.setCompat(null); // its stand-in for older browsers would come from another host
  // threads need a page that is isolated from all others, which a plain file server does not say
  const threads = globalThis.crossOriginIsolated ? Math.max(1, Math.min(4, Math.floor(navigator.hardwareConcurrency / 2))) : 1;
  const loading = wllama.loadModel([blob], { n_gpu_layers: 0, n_threads: threads, n_ctx: CONTEXT, n_batch: BATCH, n_parallel: 1, seed: SEED });
  try {
    await Promise.race([loading, failed]);
    if (!wllama.getLoadedContextInfo().success) throw new Error("it cannot read the file"); // which it does not throw itself
  } catch (error) {
    wllama.exit().catch(silent); // its worker holds the file
    throw error;
  }

  async function ask({ prompt, words, fresh = false, candidates = 0, signal, onText = silent, onRead = silent }) {
    const seen = { text: "", ended: false, candidates: [], cached: 0, computed: 0, firstMs: null, half: false };
    const began = performance.now();
    const onData = (chunk) => {
      const [choice] = chunk.choices, at = chunk.prompt_progress;
      if (at) onRead(at.processed, at.total);
      if (chunk.timings) [seen.cached, seen.computed] = [chunk.timings.cache_n, chunk.timings.prompt_n];
      if (choice.logprobs || choice.text) seen.firstMs ??= performance.now() - began;
      for (const token of choice.logprobs?.content ?? []) seen.candidates.push(token.top_logprobs.map((one) => [one.token, one.logprob]));
      if (choice.text) onText((seen.text += choice.text));
      if (choice.finish_reason) seen.ended = choice.finish_reason === "stop";
    };
    try {
      await wllama.createCompletion({
        prompt, max_tokens: words, temperature: 0, cache_prompt: !fresh, n_probs: candidates,
        stream: true, return_progress: true, timings_per_token: true, abortSignal: signal, onData,
      });
    } catch (error) {
      // The engine cannot hand over half a character, as a token of Chinese or of an emoji may be. It can go on.
      if (!/typed array/.test(error.message)) throw error;
      seen.half = true;
    }
    return seen;
  }
  return { ask, tokens, threads, context: CONTEXT, version: Wllama.getLibllamaVersion() };
}

// ---- the vocabulary, from the file's own header ------------------------------------------------------------------------------
// A GGUF begins with named values; among them are the tokens and the merges of a byte-level BPE.
// (github.com/ggml-org/ggml/blob/master/docs/gguf.md)

const SIZES = { 0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8 };
const [STRING, ARRAY] = [8, 9];

function header(buffer) {
  const view = new DataView(buffer), decoder = new TextDecoder(), found = {};
  let at = 16;
  const count = () => { at += 8; return Number(view.getBigUint64(at - 8, true)); };
  const text = () => { const size = count(); at += size; return decoder.decode(new Uint8Array(buffer, at - size, size)); };
  const number = () => { at += 4; return view.getUint32(at - 4, true); };
  const value = (type) => {
    if (type === STRING) return text();
    if (type !== ARRAY) { at += SIZES[type]; return type < 6 && SIZES[type] === 4 ? view.getInt32(at - 4, true) : null; }
    const inner = number(), size = count();
    return Array.from({ length: size }, () => value(inner));
  };
  for (let left = count(); left; left--) {
    const name = text();
    found[name] = value(number());
  }
  return found;
}

// The 256 bytes as the vocabulary writes them: what prints stands for itself, the rest for U+0100 and on
const LETTERS = (() => {
  const letters = [];
  for (let byte = 0, next = 256; byte < 256; byte++) {
    const prints = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    letters.push(String.fromCharCode(prints ? byte : next++));
  }
  return letters;
})();
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));
// llama.cpp's rule for "smollm": digits one by one, then words with the space before them
const DIGIT = /\p{N}/gu;
const WORD = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)/gu;

function split(text, rule) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(rule)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    parts.push(match[0]);
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

export async function vocabulary(blob) {
  const found = header(await blob.slice(0, 8 << 20).arrayBuffer());
  const ranks = new Map(found["tokenizer.ggml.merges"].map((merge, rank) => [merge, rank]));
  const types = found["tokenizer.ggml.token_type"];
  const marks = found["tokenizer.ggml.tokens"].filter((_, id) => types[id] === 3 || types[id] === 4); // such as <|im_start|>
  const mark = new RegExp(marks.map((one) => one.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|"), "gu");
  const encoder = new TextEncoder(), decoder = new TextDecoder();

  function merge(word) {
    const parts = Array.from(encoder.encode(word), (byte) => LETTERS[byte]);
    for (;;) {
      let best = Infinity, where = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, where] = [rank, i];
      }
      if (where < 0) return parts;
      parts.splice(where, 2, parts[where] + parts[where + 1]);
    }
  }
  const told = (part) => decoder.decode(Uint8Array.from(part, (letter) => BYTES.get(letter)));
  return (text) => split(text, mark).flatMap((piece) => (marks.includes(piece) ? [piece]
    : split(piece, DIGIT).flatMap((part) => split(part, WORD)).flatMap(merge).map(told)));
}
