// A client in TypeScript: gRPC alone, by the .proto files of this repository.
//
//     $ kvstore serve --data ./node &
//     $ npm --prefix examples/typescript ci --no-audit --no-fund --loglevel error
//     $ npm --prefix examples/typescript start --silent
//     put: DURABILITY_WRITTEN
//     got the same bytes: true
//     a block that nobody put: MISS_REASON_UNKNOWN
//
// docs/grpc.md has everything else that a client needs to know.

import { createHash } from "node:crypto";
import { join } from "node:path";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const proto = join(__dirname, "../../../proto");
const loaded = loadSync("kvstore/v1/kvstore.proto", { includeDirs: [proto], keepCase: true, longs: Number, enums: String });
const { kvstore } = grpc.loadPackageDefinition(loaded) as any;

const CHUNK_BYTES = 1 << 20; // at most 4 MiB
const DEADLINE_MS = 10_000;
const client = new kvstore.v1.KvStore("127.0.0.1:7070", grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + DEADLINE_MS });

// A key has 32 bytes, a layout's fingerprint 16: digests, made by the application, of everything that determines the bytes.
const key = (...parts: string[]) => createHash("sha256").update(JSON.stringify(parts)).digest();
const fingerprint = createHash("sha256").update("my model, bf16").digest().subarray(0, 16);

function put(name: object, data: Buffer): Promise<string> {
  return new Promise((resolve, reject) => {
    const call = client.Put(new grpc.Metadata(), deadline(), (error: grpc.ServiceError | null, answer: any) =>
      error ? reject(error) : resolve(answer.durability));
    call.write({ start: { tenant: "", name, durability: "DURABILITY_WRITTEN" } });
    for (let at = 0; at < data.length; at += CHUNK_BYTES) call.write({ chunk: data.subarray(at, at + CHUNK_BYTES) });
    call.end();
  });
}

// The block, or the reason of its miss; a miss is not an error.
function get(name: object): Promise<Buffer | { reason: string; detail: string }> {
  return new Promise((resolve, reject) => {
    const chunks: Buffer[] = [];
    const call = client.Get({ tenant: "", name }, new grpc.Metadata(), deadline());
    call.on("data", (part: any) => (part.miss ? resolve(part.miss) : chunks.push(part.chunk)));
    call.on("end", () => resolve(Buffer.concat(chunks)));
    call.on("error", reject);
  });
}

async function main() {
  const kv = Buffer.alloc(3_000_000, "the KV of a page ");
  const page = { key: key("my model", "the tokens"), fingerprint, length: kv.length };
  await new Promise<void>((resolve, reject) =>
    client.waitForReady(Date.now() + DEADLINE_MS, (error?: Error) => (error ? reject(error) : resolve())));

  console.log("put:", await put(page, kv));
  const got = await get(page);
  console.log("got the same bytes:", Buffer.isBuffer(got) && got.equals(kv));
  const miss = await get({ ...page, key: key("my model", "other tokens") });
  if (!Buffer.isBuffer(miss)) console.log(`a block that nobody put: ${miss.reason}`);
  client.close();
}

main().catch((error: grpc.ServiceError) => {
  // The trailer `kvstore-error` names the error; the call's details are a sentence about it.
  console.error(error.metadata?.get("kvstore-error")[0] ?? error.code, error.details ?? error);
  process.exitCode = 1;
});
