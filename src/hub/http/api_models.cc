// Models, manifests and slices.

#include <algorithm>
#include <format>

#include "base/hex.h"
#include "ggml.h"
#include "hub/http/hub.h"
#include "hub/http/json_input.h"
#include "hub/http/range.h"
#include "hub/models/proof.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr std::uint64_t kHoleBytesMin = 64 * 1024;

Response no_model(std::string_view name) {
  return error_response(404, std::format("there is no model '{}' here; see /api/models.", name));
}

Response json_response(const json& value) {
  Response out;
  out.text = dump(value);
  return out;
}

json summary(const HostedModel& model) {
  return {{"name", model.name()},
          {"architecture", model.moe().architecture()},
          {"n_layer", model.shape().n_expert.size()},
          {"n_expert", model.moe().n_expert()},
          {"n_expert_used", model.moe().n_expert_used()},
          {"n_embd", model.moe().n_embd()},
          {"bytes", model.moe().files().total_bytes()},
          {"ready", model.ready()},
          {"slabs", model.slab_count()},
          {"slabs_hashed", model.slabs_hashed()}};
}

Response manifest(Hub& hub, const Request& request) {
  const HostedModelPtr model = hub.catalogue().find(request.parameters.at("m"));
  if (model == nullptr) return no_model(request.parameters.at("m"));
  if (const Status unchanged = model->check_unchanged(); !unchanged) {
    hub.catalogue().rescan_soon();
    return error_response(unchanged.error());
  }
  if (!model->ready())
    return error_response(Error{ErrorAction::kRetryLater,
                                std::format("model '{}' is still being hashed ({} of {} slabs); ask again in a moment.",
                                            model->name(), model->slabs_hashed(), model->slab_count())});
  std::optional<ExpertSet> wanted;
  if (const auto layers = request.query.find("layers"); layers != request.query.end()) {
    auto parsed = parse_ranges(layers->second, static_cast<std::uint32_t>(model->shape().n_expert.size()), "layer");
    if (!parsed) return error_response(parsed.error());
    wanted = *parsed;
  }
  json layers = json::array();
  for (std::size_t i = 0; i < model->layer_ids().size(); ++i) {
    const gguf::LayerExperts& layer = model->moe().layers()[i];
    if (wanted && !wanted->contains(layer.layer)) continue;
    json tensors = json::array();
    for (const gguf::ExpertTensor& tensor : layer.tensors) {
      json hashes = json::array();
      for (const gguf::Hash& hash : model->slab_hashes(tensor)) hashes.push_back(to_hex(hash));
      tensors.push_back({{"name", tensor.name},
                         {"type", ggml_type_name(tensor.type)},
                         {"shape", tensor.ne},
                         {"per_expert", tensor.per_expert},
                         {"bytes_per_slab", tensor.bytes_per_expert},
                         {"blake3", std::move(hashes)}});
    }
    layers.push_back({{"layer", layer.layer},
                      {"group", gguf::to_string(layer.group)},
                      {"n_expert", layer.n_expert},
                      {"layer_id", to_hex(model->layer_ids()[i])},
                      {"bytes_per_expert", layer.bytes_per_expert()},
                      {"tensors", std::move(tensors)}});
  }
  json out = summary(*model);
  out["layers"] = std::move(layers);
  return json_response(out);
}

// A backbone has weights in memory and no name for them.
Response layer(Hub& hub, const Request& request) {
  const auto wanted = request.query.find("id");
  if (wanted == request.query.end()) return error_response(400, "say which layer: id=HEX, a layer's id.");
  for (const HostedModelPtr& model : hub.catalogue().list()) {
    const auto& ids = model->layer_ids();
    if (std::ranges::none_of(ids, [&](const gguf::LayerId& id) { return to_hex(id) == wanted->second; })) continue;
    json layers = json::array();
    for (std::size_t i = 0; i < ids.size(); ++i)
      layers.push_back({{"layer", model->moe().layers()[i].layer},
                        {"group", gguf::to_string(model->moe().layers()[i].group)},
                        {"layer_id", to_hex(ids[i])}});
    return json_response({{"model", model->name()}, {"layers", std::move(layers)}});
  }
  return error_response(404, "no model here has a layer of these experts; is it another version of the file?");
}

// layers=0:2&experts=0:16, or the older layer=L&expert_begin=a&expert_end=b.
Result<gguf::SlicePlan> plan_of(const HostedModel& model, const Request& request) {
  const auto parameter = [&](std::string_view name) -> const std::string* {
    const auto found = request.query.find(name);
    return found == request.query.end() ? nullptr : &found->second;
  };
  const std::string *layers = parameter("layers"), *experts = parameter("experts");
  const std::string *layer = parameter("layer"), *begin = parameter("expert_begin"), *end = parameter("expert_end");
  if (layers != nullptr && experts != nullptr && layer == nullptr && begin == nullptr && end == nullptr)
    return gguf::SlicePlan::from_ranges(model.moe(), *layers, *experts);
  if (layers == nullptr && experts == nullptr && layer != nullptr && begin != nullptr && end != nullptr)
    return gguf::SlicePlan::from_ranges(model.moe(), *layer, std::format("{}:{}", *begin, *end));
  return fix_input("say what the slice holds: layers=A:B&experts=A:B, or layer=L&expert_begin=A&expert_end=B.");
}

Response expert_shard(Hub& hub, const Request& request) {
  const HostedModelPtr model = hub.catalogue().find(request.parameters.at("m"));
  if (model == nullptr) return no_model(request.parameters.at("m"));
  const auto plan = plan_of(*model, request);
  if (!plan) return error_response(plan.error());
  auto slice = model->slice(*plan);
  if (!slice) {
    hub.catalogue().rescan_soon();
    return error_response(slice.error());
  }
  return answer_with_body(request, std::move(slice->body), slice->etag, "application/octet-stream");
}

// With extents=1 not the file but where in it there is anything but zeros: a client that
// fetches only these ranges, into a file of holes, gets the same.
Response backbone(Hub& hub, const Request& request) {
  const HostedModelPtr model = hub.catalogue().find(request.parameters.at("m"));
  if (model == nullptr) return no_model(request.parameters.at("m"));
  auto file = model->backbone();
  if (!file) {
    hub.catalogue().rescan_soon();
    return error_response(file.error());
  }
  if (const auto wanted = request.query.find("extents"); wanted == request.query.end() || wanted->second == "0")
    return answer_with_body(request, std::move(file->body), file->etag, "application/octet-stream");
  json extents = json::array();
  std::uint64_t at = 0, begin = 0;
  for (const BodyPiece& piece : file->body.pieces) {
    // Padding is not worth a range of its own.
    if (piece.kind == BodyPiece::Kind::kZeros && piece.size >= kHoleBytesMin) {
      extents.push_back({begin, at});
      begin = at + piece.size;
    }
    at += piece.size;
  }
  if (begin < at) extents.push_back({begin, at});
  return json_response({{"size", file->body.size}, {"etag", file->etag}, {"extents", extents}});
}

}  // namespace

void add_model_routes(Router& router, Hub& hub) {
  const std::vector<Scope> nodes = {Scope::kWorker, Scope::kBackbone};
  router.add({.method = "GET",
              .pattern = "/api/models",
              .summary = "The models that this hub serves",
              .scopes = {Scope::kWorker, Scope::kBackbone, Scope::kViewer},
              .query = {},
              .body_example = {},
              .answer_example =
                  R"({"models":[{"name":"qwen","architecture":"qwen3moe","n_layer":48,"n_expert":256,"n_expert_used":8,
                "n_embd":3072,"bytes":1,"ready":true,"slabs":1,"slabs_hashed":1}]})",
              .handler = [&hub](const Request&) {
                json models = json::array();
                for (const HostedModelPtr& model : hub.catalogue().list()) models.push_back(summary(*model));
                return json_response({{"models", models}});
              }});
  router.add(
      {.method = "GET",
       .pattern = "/api/models/{m}/manifest",
       .summary = "Layers, tensors and the BLAKE3 of every expert's slab",
       .scopes = nodes,
       .query = {{"layers", "only these, e.g. 0:2", false}},
       .body_example = {},
       .answer_example =
           R"({"name":"qwen","architecture":"qwen3moe","n_layer":48,"n_expert":256,"n_expert_used":8,"n_embd":3072,
                "bytes":1,
                "ready":true,"slabs":1,"slabs_hashed":1,"layers":[{"layer":0,"group":"exps","n_expert":256,
                "layer_id":"00","bytes_per_expert":1,"tensors":[{"name":"blk.0.ffn_up_exps.weight","type":"q4_K",
                "shape":[1,1,1,1],
                "per_expert":true,"bytes_per_slab":1,"blake3":["00"]}]}]})",
       .handler = [&hub](const Request& request) { return manifest(hub, request); }});
  router.add({.method = "GET",
              .pattern = "/api/layers",
              .summary = "Which model has a layer of this id, and the ids of its other layers",
              .scopes = nodes,
              .query = {{"id", "a layer's id, 64 hexadecimal digits", true}},
              .body_example = {},
              .answer_example = R"({"model":"qwen","layers":[{"layer":0,"group":"exps","layer_id":"00"}]})",
              .handler = [&hub](const Request& request) { return layer(hub, request); }});
  router.add({.method = "GET",
              .pattern = "/api/proxy/models/{m}/expert-shard",
              .summary = "A slice of the model as GGUF; ranges, If-Range and HEAD as of any file",
              .scopes = nodes,
              .query = {{"layers", "layers to hold, e.g. 0:2 or 3,7,9:12", false},
                        {"experts", "experts of each, e.g. 0:16", false},
                        {"layer", "older form: one layer", false},
                        {"expert_begin", "older form: first expert", false},
                        {"expert_end", "older form: last expert + 1", false}},
              .body_example = {},
              .answer_example = {},
              .handler = [&hub](const Request& request) { return expert_shard(hub, request); }});
  router.add(
      {.method = "GET",
       .pattern = "/api/proxy/models/{m}/backbone",
       .summary = "The model without its experts as GGUF; ranges, If-Range and HEAD as of any file",
       .scopes = {Scope::kBackbone},
       .query = {{"extents", "1: only where the file is not zero, as {size, etag, extents: [[begin, end], …]}", false}},
       .body_example = {},
       .answer_example = {},
       .handler = [&hub](const Request& request) { return backbone(hub, request); }});
}

}  // namespace kvasir::hub
