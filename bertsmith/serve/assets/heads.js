// What a person can do with a model: for each route its fields, its request, how its result is drawn, and examples.
import {drawAnswer, drawChoice, drawLabels, drawMasks, drawRanks, drawSimilarity, drawTags, drawView, hasEntities,
  lines, Refused} from "./results.js";
import {say, SHOWN_MASK} from "./words.js";

const field = (name, kind = "text", label = name) => ({name, kind, label});
const PASSAGE = {
  en: "Ada Lovelace was born in London in 1815. In 1843 she published notes on the Analytical Engine of Charles " +
    "Babbage, and one of them describes how the engine could compute Bernoulli numbers.",
  ko: "세종대왕은 1397년 한양에서 태어났다. 1443년에 훈민정음을 만들었고, 1446년에 이를 널리 알렸다. 집현전 학자들이 그 뜻과 " +
    "쓰는 법을 풀이한 책도 함께 펴냈다.",
};
const NAMES = {
  en: ["Ada Lovelace was born in London and worked with Charles Babbage.",
    "Samsung and Apple presented new phones in Seoul on Tuesday."],
  ko: ["이순신 장군은 서울에서 태어나 한산도에서 싸웠다.", "삼성전자는 화요일 서울에서 새 휴대전화를 공개했다."],
};
const OPINIONS = {
  en: ["A warm, funny film with a wonderful cast.", "I was charged twice and nobody answers my letters."],
  ko: ["배우들의 연기가 훌륭하고 이야기도 따뜻했다.", "요금이 두 번 빠져나갔는데 아무도 답이 없습니다."],
};
const PAIRS = {
  en: [["A man is asleep on a bench.", "Somebody is awake."], ["How do I reset my password?", "I forgot my password."]],
  ko: [["한 남자가 의자에서 자고 있다.", "누군가 깨어 있다."], ["비밀번호를 어떻게 바꾸나요?", "비밀번호를 잊어버렸어요."]],
};
const byName = (names, found) => Object.fromEntries(Object.entries(found).map(([language, all]) =>
  [language, all.map(each => Object.fromEntries(names.map((name, i) => [name, names.length > 1 ? each[i] : each])))]));

export const HEADS = {
  "fill-mask": {
    fields: [field("masked", "text", "text")],
    body: values => ({inputs: values.masked, top: 8}),
    check(values, model) {
      if (!values.masked.includes(model.mask) && !values.masked.includes(SHOWN_MASK))
        throw new Refused(say("mask_missing", model), "masked");
    },
    draw: drawMasks,
    examples: byName(["masked"], {
      en: ["The capital of France is [MASK].", "She opened the [MASK] and looked into the [MASK]."],
      ko: ["대한민국의 수도는 [MASK]이다.", "그는 [MASK]에서 책을 [MASK] 있다."],
    }),
  },
  classify: {
    fields: [field("text")], body: values => ({inputs: values.text}), draw: drawLabels,
    examples: byName(["text"], OPINIONS),
  },
  pair: {
    fields: [field("text", "text", "first"), field("second")],
    body: values => ({inputs: [values.text, values.second]}), draw: drawLabels,
    examples: byName(["text", "second"], PAIRS),
  },
  rerank: {
    fields: [field("query", "line"), field("texts", "lines")],
    body: values => ({query: values.query, texts: lines(values.texts), raw_scores: true}), draw: drawRanks,
    examples: byName(["query", "texts"], {
      en: [["How do I reset my password?",
        "Click “forgot password” on the login page.\nThe shop opens at nine.\nChoose a new password in the settings."]],
      ko: [["비밀번호를 어떻게 바꾸나요?",
        "로그인 화면에서 ‘비밀번호 찾기’를 누르세요.\n가게는 아홉 시에 엽니다.\n설정에서 새 비밀번호를 정할 수 있습니다."]],
    }),
  },
  tag: {
    fields: [field("text")], body: values => ({inputs: values.text}), draw: drawTags, examples: byName(["text"], NAMES),
  },
  answer: {
    fields: [field("question", "line"), field("passage")],
    body: values => ({inputs: {question: values.question, context: values.passage}, n_best: 5}), draw: drawAnswer,
    examples: byName(["question", "passage"], {
      en: [["Where was Ada Lovelace born?", PASSAGE.en], ["What does one of the notes describe?", PASSAGE.en]],
      ko: [["세종대왕은 어디에서 태어났습니까?", PASSAGE.ko], ["훈민정음은 언제 만들어졌습니까?", PASSAGE.ko]],
    }),
  },
  choose: {
    fields: [field("context", "text"), field("endings", "lines")],
    body: values => ({inputs: {context: values.context, endings: lines(values.endings)}}),
    check(values) {
      if (lines(values.endings).length < 2) throw new Refused(say("too_few_endings"), "endings");
    },
    draw: drawChoice,
    examples: byName(["context", "endings"], {
      en: [["She put the key into the lock and", "opened the door.\nate the soup.\nflew to the moon."]],
      ko: [["그는 열쇠를 자물쇠에 꽂고", "문을 열었다.\n국을 먹었다.\n달까지 날아갔다."]],
    }),
  },
  embed: {
    fields: [field("sentences", "lines")],
    body: values => ({inputs: lines(values.sentences)}), draw: drawSimilarity,
    examples: byName(["sentences"], {
      en: ["A man is playing a guitar.\nSomebody plays an instrument.\nThe cat sleeps on the sofa.\n" +
        "A kitten is lying on the couch.\nThe stock market fell on Monday."],
      ko: ["한 남자가 기타를 치고 있다.\n누군가 악기를 연주한다.\n고양이가 소파에서 잔다.\n새끼 고양이가 소파에 누워 있다.\n" +
        "월요일에 주가가 떨어졌다."],
    }),
  },
  view: {
    fields: [field("text"), {...field("pair", "text", "second_optional"), optional: true}],
    body: values => ({inputs: values.pair.trim() ? [values.text, values.pair] : values.text}), draw: drawView,
    examples: byName(["text", "pair"], {
      en: [[NAMES.en[0], ""], ["The animal did not cross the street because it was too tired.", ""], PAIRS.en[0]],
      ko: [[NAMES.ko[0], ""], PAIRS.ko[0]],
    }),
  },
};

// The heads of a model, the one that it was trained for first.
export function headsOf(model) {
  const known = Object.keys(HEADS).filter(name => model.routes.includes(name));
  if (model.columns?.pair && known.includes("pair")) known.sort((a, b) => (b === "pair") - (a === "pair"));
  return known;
}

// The name of a head on the page: a regression gives a number, not a label, and not every tag marks an entity.
export function titleOf(name, model) {
  if (model.head === "regression") return {classify: "value", pair: "value_pair"}[name] || name;
  return name === "tag" && !hasEntities(model) ? "tag_words" : name;
}
