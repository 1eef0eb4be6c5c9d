// A client in C++: gRPC alone, by the .proto files of this repository.
//
//     $ kvstore serve --data ./node &
//     $ mkdir -p examples/cpp/build
//     $ protoc -I proto --cpp_out=examples/cpp/build --grpc_out=examples/cpp/build \
//         --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" kvstore/v1/kvstore.proto
//     $ g++ -std=c++17 -I examples/cpp/build -o examples/cpp/build/client examples/cpp/client.cc \
//         examples/cpp/build/kvstore/v1/*.cc $(pkg-config --cflags --libs grpc++ protobuf libcrypto)
//     $ examples/cpp/build/client
//     put: DURABILITY_WRITTEN
//     got the same bytes: true
//     a block that nobody put: MISS_REASON_UNKNOWN
//     other bytes under the same key: KeyTaken
//
// Debian has what it needs: apt-get install g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc libssl-dev
// docs/grpc.md has everything else that a client needs to know.

#include <chrono>
#include <iostream>
#include <string>

#include <grpcpp/grpcpp.h>
#include <openssl/sha.h>

#include "kvstore/v1/kvstore.grpc.pb.h"

namespace kv = kvstore::v1;

constexpr size_t CHUNK_BYTES = 1 << 20;  // at most 4 MiB
constexpr std::chrono::seconds DEADLINE{10};

std::string digest(const std::string &text) {
  std::string made(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char *>(text.data()), text.size(),
         reinterpret_cast<unsigned char *>(made.data()));
  return made;
}

// A key has 32 bytes, a layout's fingerprint 16: digests, made by the application, of everything that determines the bytes.
kv::BlockName name_of(const std::string &tokens, size_t length) {
  kv::BlockName name;
  name.set_key(digest("my model\n" + tokens));
  name.set_fingerprint(digest("my model, bf16").substr(0, 16));
  name.set_length(length);
  return name;
}

// A call that fails names its error in the trailer `kvstore-error`; the status has a sentence for people.
std::string error_of(const grpc::ClientContext &context, const grpc::Status &status) {
  const auto &trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("kvstore-error");
  return found == trailers.end() ? status.error_message() : std::string(found->second.data(), found->second.size());
}

// How durable the block is now, or the name of the error.
std::string put(kv::KvStore::Stub &node, const kv::BlockName &name, const std::string &bytes) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + DEADLINE);
  context.set_wait_for_ready(true);  // the node may still be starting
  kv::PutResponse answer;
  const auto writer = node.Put(&context, &answer);
  kv::PutRequest request;
  *request.mutable_start()->mutable_name() = name;
  request.mutable_start()->set_durability(kv::DURABILITY_WRITTEN);
  bool is_open = writer->Write(request);
  for (size_t at = 0; is_open && at < bytes.size(); at += CHUNK_BYTES) {
    request.set_chunk(bytes.substr(at, CHUNK_BYTES));
    is_open = writer->Write(request);  // false: the node has ended the call, and its status says why
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  return status.ok() ? kv::Durability_Name(answer.durability()) : error_of(context, status);
}

// The block in `bytes`, or the reason why it is not served; a miss is not an error.
std::string get(kv::KvStore::Stub &node, const kv::BlockName &name, std::string &bytes) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + DEADLINE);
  kv::GetRequest request;
  *request.mutable_name() = name;
  const auto reader = node.Get(&context, request);
  kv::GetResponse part;
  std::string miss;
  while (reader->Read(&part)) {
    if (part.has_miss())
      miss = kv::MissReason_Name(part.miss().reason());
    else
      bytes += part.chunk();
  }
  const grpc::Status status = reader->Finish();
  return status.ok() ? miss : error_of(context, status);
}

int main() {
  const auto node = kv::KvStore::NewStub(grpc::CreateChannel("127.0.0.1:7070", grpc::InsecureChannelCredentials()));
  const std::string kv(3'000'000, 'k');
  const kv::BlockName page = name_of("the tokens", kv.size());

  std::cout << "put: " << put(*node, page, kv) << std::endl;
  std::string bytes;
  const std::string missed = get(*node, page, bytes);
  std::cout << "got the same bytes: " << std::boolalpha << (missed.empty() && bytes == kv) << std::endl;
  std::cout << "a block that nobody put: " << get(*node, name_of("other tokens", kv.size()), bytes) << std::endl;
  std::cout << "other bytes under the same key: " << put(*node, page, std::string(kv.size(), 'x')) << std::endl;
}
