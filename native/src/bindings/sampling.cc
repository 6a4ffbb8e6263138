// Python's view of SamplerSlots: checks shapes and types, releases the GIL, samples; nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bindings/arguments.h"
#include "kernels/sampler_slots.h"
#include "runtime/aligned.h"
#include "runtime/kernel_table.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Logits = In<float>;
using Mask = In<uint32_t>;

float* thread_scratch(int vocab_size) {
  thread_local AlignedArray<float> scratch;
  scratch.reserve(sampling_scratch_floats(vocab_size));
  return scratch.data();
}

// Token ids of any Python iterable; a value that is no id of any vocabulary is an error here, the vocabulary's own limit is SamplerSlots'.
std::vector<int32_t> ids_of(const char* name, nb::handle iterable) {
  std::vector<int32_t> ids;
  for (nb::handle item : iterable) {
    int32_t id;
    if (!nb::try_cast<int32_t>(item, id)) {
      throw nb::value_error((std::string(name) + ": " + nb::repr(item).c_str() + " is not a token id").c_str());
    }
    ids.push_back(id);
  }
  return ids;
}

std::vector<uint32_t> mask_of_ids(const std::vector<int32_t>& ids, int vocab_size) {
  std::vector<uint32_t> mask((static_cast<size_t>(vocab_size) + 31) / 32, 0);
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      const std::string message = "mask: token id " + std::to_string(id) + " is not in 0 .. " + std::to_string(vocab_size - 1);
      throw nb::value_error(message.c_str());
    }
    mask[static_cast<size_t>(id) / 32] |= 1u << id % 32;
  }
  return mask;
}

// core.request.SamplingParams, held to its own limits, with the entry's end tokens, as the slot wants it.
SlotParams params_of(nb::handle entry, int vocab_size) {
  const nb::object p = entry.attr("params");
  p.attr("validate")(vocab_size);
  const auto number = [&p](const char* name) { return static_cast<float>(nb::cast<double>(p.attr(name))); };
  SlotParams out;
  out.temperature = number("temperature");
  out.top_p = number("top_p");
  out.min_p = number("min_p");
  out.top_k = static_cast<int>(std::min<int64_t>(nb::cast<int64_t>(p.attr("top_k")), vocab_size));
  out.repetition_penalty = number("repetition_penalty");
  out.frequency_penalty = number("frequency_penalty");
  out.presence_penalty = number("presence_penalty");
  out.min_tokens = nb::cast<int64_t>(p.attr("min_tokens"));
  const nb::object bias = p.attr("logit_bias");
  for (nb::handle token : bias) {
    const int32_t id = ids_of("logit_bias", nb::make_tuple(token))[0];
    out.logit_bias.emplace_back(id, static_cast<float>(nb::cast<double>(bias[token])));
  }
  out.stop_ids = ids_of("stop_token_ids", p.attr("stop_token_ids"));
  for (const int32_t id : ids_of("eos_token_ids", entry.attr("eos_token_ids"))) out.stop_ids.push_back(id);
  for (nb::handle word : nb::object(p.attr("bad_words_token_ids"))) out.bad_words.push_back(ids_of("bad_words_token_ids", word));
  const nb::object allowed = p.attr("allowed_token_ids");
  if (!allowed.is_none()) out.allowed = mask_of_ids(ids_of("allowed_token_ids", allowed), vocab_size);
  return out;
}

uint64_t seed_of(nb::handle seed) {
  const unsigned long long value = PyLong_AsUnsignedLongLongMask(seed.ptr());
  if (PyErr_Occurred()) throw nb::python_error();
  return value;
}

void open_slot(SamplerSlots& slots, nb::handle entry) {
  slots.open(nb::cast<int>(entry.attr("slot")), params_of(entry, slots.vocab_size()), seed_of(nb::object(entry.attr("seed"))),
             ids_of("prompt_token_ids", entry.attr("prompt_token_ids")), ids_of("output_token_ids", entry.attr("output_token_ids")));
}

void check_size(const char* name, size_t size, size_t wanted) {
  if (size == wanted) return;
  throw nb::value_error((std::string(name) + ": size " + std::to_string(size) + " is not " + std::to_string(wanted)).c_str());
}

int checked_num_logprobs(std::optional<int> k) {
  if (!k) return -1;
  if (*k >= 0 && *k <= kMaxLogprobs) return *k;
  throw nb::value_error(("logprobs: " + std::to_string(*k) + " is not in 0 .. " + std::to_string(kMaxLogprobs)).c_str());
}

// (token id, logprob, rank, top ids, top logprobs), the fields of core.step.TokenLogprobs.
nb::tuple logprobs_tuple(const TokenLogprobs& l) {
  nb::list ids, values;
  for (int i = 0; i < l.num_top; ++i) {
    ids.append(l.top_ids[i]);
    values.append(static_cast<double>(l.top_logprobs[i]));
  }
  return nb::make_tuple(l.token_id, static_cast<double>(l.logprob), l.rank, ids, values);
}

nb::tuple sample(SamplerSlots& slots, int slot, Logits logits, int64_t position, std::optional<Mask> mask, std::optional<int> num_logprobs) {
  const int vocab_size = slots.vocab_size(), k = checked_num_logprobs(num_logprobs);
  check_size("logits", logits.size(), static_cast<size_t>(vocab_size));
  if (mask) check_size("mask", mask->size(), (static_cast<size_t>(vocab_size) + 31) / 32);
  if (position < 0) throw nb::value_error(("position: " + std::to_string(position) + " is negative").c_str());
  SampleOutput out;
  {
    nb::gil_scoped_release release;
    float* scratch = thread_scratch(vocab_size);
    out = slots.sample(slot, scan_row(slots.kernels(), logits.data(), vocab_size, scratch), scratch, position, mask ? mask->data() : nullptr, k);
  }
  if (out.status != SampleStatus::kOk) return nb::make_tuple(-1, nb::none(), sample_error(out.status, out.token_id));
  return nb::make_tuple(out.token_id, out.has_logprobs ? nb::object(logprobs_tuple(out.logprobs)) : nb::none(), nb::none());
}

nb::tuple python_raw_logprobs(Logits logits, int token_id, int k, const std::string& isa) {
  const SamplingKernels& kernels = sampling_kernels_of(isa);
  const int vocab_size = static_cast<int>(logits.size());
  if (token_id < 0 || token_id >= vocab_size) {
    throw nb::value_error(("token_id: " + std::to_string(token_id) + " is not in 0 .. " + std::to_string(vocab_size - 1)).c_str());
  }
  checked_num_logprobs(k);
  SampleOutput out;
  {
    nb::gil_scoped_release release;
    float* scratch = thread_scratch(vocab_size);
    out = raw_logprobs(kernels, scan_row(kernels, logits.data(), vocab_size, scratch), token_id, k, scratch);
  }
  if (out.status != SampleStatus::kOk) throw nb::value_error(sample_error(out.status, out.token_id).c_str());
  return logprobs_tuple(out.logprobs);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<SamplerSlots>(m, "SamplerSlots", "Sampling state of sequences and the native draw; the rule is octavo.sampling.reference.")
      .def("__init__",
           [](SamplerSlots* self, int vocab_size, int max_num_slots, const std::string& isa) {
             new (self) SamplerSlots(vocab_size, max_num_slots, &sampling_kernels_of(isa));
           },
           nb::arg("vocab_size"), nb::arg("max_num_slots"), nb::arg("isa"))
      .def("open", &open_slot, nb::arg("entry"), "Open entry.slot from a core.step.SlotOpen.")
      .def("fork", [](SamplerSlots& s, int src, int dst, nb::handle seed) { s.fork(src, dst, seed_of(seed)); }, nb::arg("src"), nb::arg("dst"), nb::arg("seed"))
      .def("close", &SamplerSlots::close, nb::arg("slot"))
      .def("sample", &sample, nb::arg("slot"), nb::arg("logits").noconvert(), nb::arg("position"), nb::arg("mask").noconvert() = nb::none(), nb::arg("logprobs") = nb::none(),
           "-> (token id or -1, None or (token id, logprob, rank, top ids, top logprobs), None or error)");
  m.def("raw_logprobs", &python_raw_logprobs, nb::arg("logits").noconvert(), nb::arg("token_id"), nb::arg("k"), nb::arg("isa"),
        "(token id, logprob, rank, top ids, top logprobs) of raw logits; ValueError for a row without an answer.");
}

}  // namespace octavo
