// The words of the page in English and Korean, and which language is chosen.
import {ENGLISH as VIEW, filled} from "./view.js";

export const SHOWN_MASK = document.body.dataset.mask; // of a masked word, whatever the mask token of a model is

const WORDS = {
  en: {
    ...VIEW,
    attention: "Attention", layer: "Layer", head: "Head", show: "Show", way_to: "what it attends to",
    way_from: "what attends to it", bare: "without special tokens", all_heads: "All heads",
    pictures: "In each picture a row is a query token and a column a key token. Click a head to select it.",
    nearest: "Nearest words, layer by layer",
    nearest_note: "The words of the vocabulary whose embeddings are most similar to the token’s hidden state (cosine).",
    lead: "Try the models of this server.", language: "Language", model: "Model", task: "Task", run: "Run",
    stop: "Stop", examples: "Examples", example: "Example", result: "Result", routes: "The routes of this server",
    key_title: "API key", key_open: "Open", key_forget: "Forget the key",
    key_note: "This server asks for a key. The page keeps it until you close this tab, and sends it only to this server.",
    size: "{layers} layers, {length} tokens at most", insert_mask: "Insert {mask}",

    "fill-mask": "Masked words", classify: "Classify", pair: "Compare two texts", tag: "Entities",
    answer: "Answer a question", choose: "Choose an ending", embed: "Similarity", rerank: "Rank texts", view: "Attention",
    value: "Score", value_pair: "Score two texts", tag_words: "Tags of words",
    "about_fill-mask": "Write {mask} where a word is missing; the model predicts it.",
    about_classify: "The model chooses the label of a text.", about_pair: "The model chooses the label of a pair of texts.",
    about_value: "The model gives a text a number.", about_value_pair: "The model gives a pair of texts a number.",
    about_tag: "The model finds names and other entities in a text.",
    about_tag_words: "The model gives every word a tag.",
    about_answer: "The model finds the answer to a question in a passage.",
    about_choose: "The model chooses the ending that fits best.",
    about_embed: "The model turns each line into a vector; the matrix shows how similar they are (cosine).",
    about_rerank: "The model sorts texts by how well they fit a query.",
    about_view: "What each token attends to, by layer and head. Point at a token to see it; a click keeps it.",

    text: "Text", first: "First text", second: "Second text", second_optional: "Second text (optional)",
    question: "Question", passage: "Passage", context: "Beginning", endings: "Endings, one per line",
    sentences: "Sentences, one per line", query: "Query", texts: "Texts, one per line",

    mask_number: "Mask {number}", no_label: "none of the labels", label: "label", word: "word", tags: "tag",
    share: "probability", entity: "entity", kind: "type", every_word: "Every word", other_labels: "All {count} labels",
    no_entities: "The model found no entities.", no_answer: "The passage has no answer.",
    no_answer_odds: "Log-odds of no answer against the best answer: {odds}", candidates: "Candidates",
    most_similar: "Most similar: {first} and {second} ({cosine})", vectors: "{count} vectors of {size} numbers",
    one_more: "Write a second line to compare it with the first.",
    too_many: "The matrix shows the first {count} of {all} sentences.",
    request: "Request and response", copy: "Copy", copied: "Copied", milliseconds: "{time} ms",
    view_done: "{count} tokens, {layers} layers with {heads} heads", working: "The model is working.",
    stopped_by_you: "Stopped.", again: "Try again", shortened: "… ({count} characters more)",

    empty: "Please fill in: {field}",
    mask_missing: "The text has no {mask}. Put it where a word is missing.",
    too_few_endings: "Please write at least two endings, one per line.",
    problem_stopped: "The server does not answer. It may have been stopped, or the connection is interrupted.",
    problem_key: "The server does not accept this key.",
    problem_long: "The text is too long.",
    problem_busy: "The server is busy. Please try again in {seconds} s.",
    problem_closing: "The server is shutting down.",
    problem_input: "The server cannot use this input.",
    problem_missing: "The server does not know this model or route any more. Please reload the page.",
    problem_slow: "The text did not reach the server in time. Please try again.",
    problem_failed: "The server failed. Its log has the reason.",
  },
  ko: {
    attends_to: "{token} 토큰이 주목하는 토큰", attends_from: "{token} 토큰에 주목하는 토큰",
    if_masked: "{token} 토큰을 가리면", itself: "원래 토큰 {token}: {share}, {rank}위",
    never_masked: "{token}: 가리지 않는 특수 토큰입니다.", mean: "평균", mean_of_all: "전체 평균",
    all_layers: "모든 층", layer_number: "{number}층", head_number: "헤드 {number}", embeddings: "임베딩",
    why_not: "이 모델은 가려진 단어를 예측할 수 없습니다. ({reason})",
    attention: "어텐션", layer: "층", head: "헤드", show: "보기", way_to: "이 토큰이 주목하는 토큰",
    way_from: "이 토큰에 주목하는 토큰", bare: "특수 토큰 제외", all_heads: "모든 헤드",
    pictures: "그림마다 행은 쿼리 토큰, 열은 키 토큰입니다. 헤드를 누르면 선택됩니다.",
    nearest: "층별로 가장 가까운 단어",
    nearest_note: "토큰의 은닉 상태와 임베딩이 가장 비슷한(코사인) 어휘 속 단어입니다.",
    lead: "이 서버의 모델을 직접 써 보세요.", language: "언어", model: "모델", task: "작업", run: "실행",
    stop: "중지", examples: "예시", example: "예시", result: "결과", routes: "이 서버의 API 문서",
    key_title: "API 키", key_open: "열기", key_forget: "키 지우기",
    key_note: "이 서버를 쓰려면 키가 필요합니다. 키는 이 탭을 닫을 때까지만 보관되고 이 서버로만 전송됩니다.",
    size: "{layers}층, 최대 {length}토큰", insert_mask: "{mask} 넣기",

    "fill-mask": "빈칸 채우기", classify: "분류", pair: "두 문장 비교", tag: "개체명",
    answer: "질문에 답하기", choose: "이어질 말 고르기", embed: "유사도", rerank: "순위 매기기", view: "어텐션",
    value: "점수", value_pair: "두 문장 점수", tag_words: "단어 태그",
    "about_fill-mask": "빈칸 자리에 {mask}를 쓰면 모델이 들어갈 단어를 예측합니다.",
    about_classify: "모델이 글의 레이블을 고릅니다.", about_pair: "모델이 두 글의 관계를 나타내는 레이블을 고릅니다.",
    about_value: "모델이 글에 점수를 매깁니다.", about_value_pair: "모델이 두 글에 점수를 매깁니다.",
    about_tag: "모델이 글에서 이름 같은 개체를 찾습니다.",
    about_tag_words: "모델이 단어마다 태그를 붙입니다.",
    about_answer: "모델이 지문에서 질문의 답을 찾습니다.",
    about_choose: "모델이 가장 잘 이어지는 말을 고릅니다.",
    about_embed: "모델이 각 줄을 벡터로 바꿉니다. 행렬은 문장이 서로 얼마나 비슷한지(코사인) 보여 줍니다.",
    about_rerank: "모델이 검색어에 잘 맞는 순서로 글을 정렬합니다.",
    about_view: "토큰이 어느 토큰에 주목하는지 층과 헤드별로 봅니다. 토큰을 가리키면 보이고, 누르면 고정됩니다.",

    text: "글", first: "첫 번째 글", second: "두 번째 글", second_optional: "두 번째 글 (선택)",
    question: "질문", passage: "지문", context: "앞부분", endings: "이어질 말 (한 줄에 하나씩)",
    sentences: "문장 (한 줄에 하나씩)", query: "검색어", texts: "글 (한 줄에 하나씩)",

    mask_number: "빈칸 {number}", no_label: "해당하는 레이블 없음", label: "레이블", word: "단어", tags: "태그",
    share: "확률", entity: "개체", kind: "종류", every_word: "단어별 태그", other_labels: "레이블 {count}개 모두 보기",
    no_entities: "찾은 개체가 없습니다.", no_answer: "지문에 답이 없습니다.",
    no_answer_odds: "가장 좋은 답에 대한 ‘답 없음’의 로그 오즈: {odds}", candidates: "답 후보",
    most_similar: "가장 비슷한 문장: {first}번과 {second}번 ({cosine})", vectors: "{size}차원 벡터 {count}개",
    one_more: "비교하려면 한 줄을 더 쓰세요.",
    too_many: "문장 {all}개 가운데 처음 {count}개만 행렬에 표시합니다.",
    request: "요청과 응답", copy: "복사", copied: "복사했습니다", milliseconds: "{time}ms",
    view_done: "토큰 {count}개, {layers}층, 층마다 헤드 {heads}개", working: "모델이 계산하고 있습니다.",
    stopped_by_you: "중지했습니다.", again: "다시 시도", shortened: "… ({count}자 더 있음)",

    empty: "다음을 입력하세요: {field}",
    mask_missing: "글에 {mask}가 없습니다. 빈칸 자리에 넣으세요.",
    too_few_endings: "이어질 말을 한 줄에 하나씩 두 개 이상 쓰세요.",
    problem_stopped: "서버가 응답하지 않습니다. 서버가 멈췄거나 연결이 끊겼을 수 있습니다.",
    problem_key: "서버가 이 키를 받아들이지 않습니다.",
    problem_long: "글이 너무 깁니다.",
    problem_busy: "서버가 바쁩니다. {seconds}초 뒤에 다시 시도하세요.",
    problem_closing: "서버가 종료되는 중입니다.",
    problem_input: "서버가 처리할 수 없는 입력입니다.",
    problem_missing: "서버에 이 모델이나 경로가 더 이상 없습니다. 페이지를 새로 고치세요.",
    problem_slow: "글이 제시간에 서버에 도착하지 않았습니다. 다시 시도하세요.",
    problem_failed: "서버에서 오류가 났습니다. 원인은 서버 로그에 있습니다.",
  },
};
const KEPT = "bertsmith-language";

function kept() {
  try { return localStorage.getItem(KEPT); } catch { return null; }  // a browser may forbid storage
}

export let language = WORDS[kept()] ? kept() : navigator.language.toLowerCase().startsWith("ko") ? "ko" : "en";

export function speak(chosen) {
  language = chosen;
  try { localStorage.setItem(KEPT, chosen); } catch { /* then it is chosen again next time */ }
}

export const say = (name, values = {}) => filled(WORDS[language][name], values);

// Puts the words of the chosen language into the elements that name them.
export function translate(root) {
  for (const element of root.querySelectorAll("[data-say]")) element.textContent = say(element.dataset.say);
  for (const element of root.querySelectorAll("[data-say-label]"))
    element.setAttribute("aria-label", say(element.dataset.sayLabel));
}

export {WORDS};
