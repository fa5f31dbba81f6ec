// Decompresses gzip files whole, in small steps, from every mark and with bits flipped. Not part of the package:
//   cmake -S native -B build/check -DRECMILL_SANITIZE=address,undefined && cmake --build build/check --target inflate_check
//   build/check/inflate_check ROUNDS FILE.gz...
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

#include "inflate.hpp"

namespace {

// The text, when the file is fed in steps from a byte on.
std::string text_of(gzip::Stream& stream, const std::string& file, size_t from, size_t step) {
  std::string text;
  std::vector<uint8_t> room(100000);
  while (!stream.is_finished()) {
    if (const size_t size = stream.read(room.data(), room.size())) {
      text.append(reinterpret_cast<const char*>(room.data()), size);
      continue;
    }
    const size_t size = std::min(step, file.size() - from);
    stream.feed(reinterpret_cast<const uint8_t*>(file.data()) + from, size);
    from += size;
  }
  return text;
}

bool agrees(const std::string& file, std::vector<gzip::Mark>& marks) {
  gzip::Stream whole;
  whole.mark_every(50000);
  const std::string text = text_of(whole, file, 0, 1 << 16);
  marks = whole.take_marks();
  for (const size_t step : {1, 7, 1000}) {
    gzip::Stream stream;
    if (text_of(stream, file, 0, step) != text) return false;
  }
  for (const gzip::Mark& mark : marks) {
    gzip::Stream stream(mark);
    if (text_of(stream, file, mark.bit >> 3, 1 << 16) != text.substr(mark.offset)) return false;
  }
  return true;
}

bool is_damaged(gzip::Stream stream, const std::string& file, size_t from, size_t step) {
  try {
    text_of(stream, file, from, step);
    return false;
  } catch (const gzip::Damaged&) {
    return true;
  }
}

int flip(const std::string& file, const std::vector<gzip::Mark>& marks, int rounds) {
  std::mt19937_64 draw(1);
  int found = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string damaged = file;
    for (size_t flips = 1 + draw() % 4; flips; --flips) damaged[draw() % damaged.size()] ^= static_cast<char>(1 << (draw() % 8));
    if (draw() % 4 == 0) damaged.resize(draw() % damaged.size());
    found += is_damaged(gzip::Stream(), damaged, 0, 1 + draw() % 70000);
    if (marks.empty() || damaged.empty()) continue;
    gzip::Mark mark = marks[draw() % marks.size()];
    mark.bit = draw() % (damaged.size() * 8);
    mark.window.resize(draw() % (mark.window.size() + 1));
    is_damaged(gzip::Stream(mark), damaged, mark.bit >> 3, 1 + draw() % 70000);
  }
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 0;
  for (int i = 2; i < count; ++i) {
    std::ifstream stream(arguments[i], std::ios::binary);
    const std::string file((std::istreambuf_iterator<char>(stream)), {});
    std::vector<gzip::Mark> marks;
    if (!agrees(file, marks)) {
      std::printf("%s: DIFFERS\n", arguments[i]);
      return 1;
    }
    std::printf("%s: %zu marks agree, %d of %d damaged files found out\n", arguments[i], marks.size(), flip(file, marks, rounds), rounds);
  }
}
